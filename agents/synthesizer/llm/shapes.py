"""Shapes of answers as a prompt shows them, and texts clipped to a limit."""

from typing import Any

# Nesting levels of an answer down to which fields are named.
MAX_DEPTH = 6
# Fields of one object.
MAX_FIELDS = 40
# Stands for the keys of an object whose keys are data.
MAP_KEY = "(id)"


def is_map(value: dict[Any, Any]) -> bool:
    """Return whether an object's keys are data, as ids of records are: each has a digit, and each holds an object."""
    return bool(value) and all(
        isinstance(part, dict) and any(sign.isdigit() for sign in str(key)) for key, part in value.items()
    )


def shape(value: object, depth: int = MAX_DEPTH) -> object:
    """Return the shape of an answer: its fields with the kinds of their values."""
    if isinstance(value, dict):
        if depth and is_map(value):
            return {MAP_KEY: merged_shapes([shape(part, depth - 1) for part in value.values()])}
        items = list(value.items())[:MAX_FIELDS]
        return {clipped(str(key), 80): shape(item, depth - 1) for key, item in items} if depth else "object"
    if isinstance(value, list):
        shapes = [shape(item, depth - 1) for item in value] if depth else []
        return [merged_shapes(shapes)] if shapes else []
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "number"
    return "null" if value is None else "text"


def merged_shapes(shapes: list[object]) -> object:
    """Return all shapes in one."""
    first, *rest = shapes
    for other in rest:
        first = merged(first, other)
    return first


def merged(first: object, other: object) -> object:
    """Return both shapes in one: all fields of both, and "text or null" for a value of several kinds."""
    if isinstance(first, dict) and isinstance(other, dict):
        common = {key: merged(first[key], other[key]) for key in first if key in other}
        return dict(list({**first, **other, **common}.items())[:MAX_FIELDS])
    if isinstance(first, list) and isinstance(other, list):
        return [merged(first[0], other[0])] if first and other else first or other
    if isinstance(first, str) and isinstance(other, str):
        return first if other in first.split(" or ") or first == other else f"{first} or {other}"
    return first if isinstance(first, dict | list) else other


def clipped(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a text, followed by the number of those left out."""
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit} characters)"
