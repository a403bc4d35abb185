"""Paths into JSON values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.scoring.conditions import parse_path, values_at

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def path_values(path: str, value: Any) -> list[Any]:
    return list(values_at(parse_path(path), value))


def leaves(value: Any, path: str = "$") -> list[tuple[str, Any]]:
    """Every place in a value, with its path."""
    pending = [(path, value)]
    if isinstance(value, dict):
        for key, item in value.items():
            quoted = key.replace("\\", "\\\\").replace('"', '\\"')
            pending += leaves(item, f'{path}["{quoted}"]')
    if isinstance(value, list):
        for index, item in enumerate(value):
            pending += leaves(item, f"{path}[{index if index % 2 else index - len(value)}]")
    return pending


@given(JSON)
def test_every_value_of_a_document_has_its_path(value: Any) -> None:
    for path, item in leaves(value):
        assert [id(path_value) for path_value in path_values(path, value)] == [id(item)]


@given(JSON)
def test_the_wildcard_gives_all_children_in_order(value: Any) -> None:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    assert path_values("$[*]", value) == path_values("$.*", value) == inner


@given(st.text(max_size=12), JSON)
def test_any_text_is_a_path_or_is_refused(text: str, value: Any) -> None:
    try:
        path = parse_path(f"${text}")
    except ValueError:
        return
    list(values_at(path, value))  # never raises


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("$", [{"a": [{"b": 1}, {"b": 2}, {}], "c.d": True}]),
        ("$.a[*].b", [1, 2]),
        ("$.a[-1]", [{}]),
        ("$['c.d']", [True]),
        ("$.a[3]", []),
        ("$.a.b", []),
        ("$.none.b[0]", []),
    ],
)
def test_paths(path: str, expected: list[Any]) -> None:
    assert path_values(path, json.loads('{"a": [{"b": 1}, {"b": 2}, {}], "c.d": true}')) == expected


@pytest.mark.parametrize("path", ["", "a.b", "$.", "$..a", "$[1:2]", "$[?(@.a)]", "$.a[", "$ .a"])
def test_invalid_paths_are_refused_with_the_position(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        parse_path(path)
