"""Flatten content parts to text, and read the fields of untrusted requests."""

import json
from collections.abc import Mapping
from typing import Any

# Names of the parts that are no text.
PART_NAMES = {"input_image": "image", "image_url": "image", "input_file": "file", "input_audio": "audio"}

Fields = Mapping[str, Any]


def flat_text(content: object, separator: str = "\n") -> str:
    """Return the text of a message's content: text, a list of parts or None; an image becomes "[image]"."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return separator.join(map(_part_text, content))
    return json.dumps(content, ensure_ascii=False)


def objects(value: object, name: str) -> list[dict[str, Any]]:
    """Return a list of JSON objects; raises ``ValueError`` with the field's ``name`` for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name} have to be a list of objects")
    return value


def known_objects(value: object) -> list[dict[str, Any]]:
    """Return the JSON objects in a list and leave out everything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return json.dumps(part)
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return str(part[name])
    kind = str(part.get("type"))
    return f"[{PART_NAMES.get(kind, kind)}]"
