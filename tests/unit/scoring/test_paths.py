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


def found(path: str, value: Any) -> list[Any]:
    return list(values_at(parse_path(path), value))


def leaves(value: Any, path: str = "$") -> list[tuple[str, Any]]:
    """Every place in a value, with its path."""
    here = [(path, value)]
    if isinstance(value, dict):
        for key, item in value.items():
            quoted = key.replace("\\", "\\\\").replace('"', '\\"')
            here += leaves(item, f'{path}["{quoted}"]')
    if isinstance(value, list):
        for index, item in enumerate(value):
            here += leaves(item, f"{path}[{index if index % 2 else index - len(value)}]")
    return here


@given(JSON)
def test_every_place_of_a_value_has_a_path_that_leads_there_and_nowhere_else(value: Any) -> None:
    for path, item in leaves(value):
        assert [id(one) for one in found(path, value)] == [id(item)]


@given(JSON)
def test_the_star_is_every_inner_value_in_order(value: Any) -> None:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    assert found("$[*]", value) == found("$.*", value) == inner


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
    assert found(path, json.loads('{"a": [{"b": 1}, {"b": 2}, {}], "c.d": true}')) == expected


@pytest.mark.parametrize("path", ["", "a.b", "$.", "$..a", "$[1:2]", "$[?(@.a)]", "$.a[", "$ .a"])
def test_what_is_no_path_is_refused_with_the_place(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        parse_path(path)
