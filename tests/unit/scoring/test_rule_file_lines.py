"""Lines of a TOML document's values."""

import json
import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from traced.scoring.rule_file import TomlPath, lines_of

TEXT = '''# a comment with [brackets] = "and" strings
top = 1.5
when = 1979-05-27 07:32:00

[[rule]]  # the first
name = """
[[rule]]
not = a header"""
"odd.key" = {a.b = 1, c = [1, 2]}

[rule.check]
expect = {eq = "x"}
[[rule]]
any = [
    # nothing here
    {call = 'x'},

    {call = "y", not = {turns = 3}}, [4,
    5],
]
'''
EXPECTED: dict[TomlPath, int] = {
    ("top",): 2,
    ("when",): 3,
    ("rule", 0): 5,
    ("rule", 0, "name"): 6,
    ("rule", 0, "odd.key"): 9,
    ("rule", 0, "odd.key", "a", "b"): 9,
    ("rule", 0, "odd.key", "c", 1): 9,
    ("rule", 0, "check"): 11,
    ("rule", 0, "check", "expect", "eq"): 12,
    ("rule", 1): 13,
    ("rule", 1, "any", 0, "call"): 16,
    ("rule", 1, "any", 1, "not", "turns"): 18,
    ("rule", 1, "any", 2, 1): 19,
}

KEYS = st.text(min_size=1, max_size=4)
VALUES = st.recursive(
    st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


def places(value: Any, path: TomlPath = ()) -> list[TomlPath]:
    """The path of every value in what ``tomllib`` gives."""
    inner: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    if isinstance(value, list):
        inner = list(enumerate(value))
    return [place for key, item in inner for place in ((*path, key), *places(item, (*path, key)))]


def to_toml(value: Any) -> str:
    """A value in one line, arrays over several."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(key)} = {to_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[\n" + "".join(f"  {to_toml(item)},\n" for item in value) + "]"
    return quoted(value) if isinstance(value, str) else repr(value).lower() if isinstance(value, bool) else repr(value)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def test_lines_are_those_of_the_text() -> None:
    lines = lines_of(TEXT)
    assert {path: lines[path] for path in EXPECTED} == EXPECTED
    assert set(lines) == set(places(tomllib.loads(TEXT)))


@settings(max_examples=50)
@given(st.lists(st.dictionaries(KEYS, VALUES, max_size=3), min_size=1, max_size=3))
def test_every_value_has_a_line_and_nothing_else_has(tables: list[dict[str, Any]]) -> None:
    text, headers = "", []
    for table in tables:
        headers.append(text.count("\n") + 1)
        text += "[[t]]\n" + "".join(f"{quoted(key)} = {to_toml(value)}\n" for key, value in table.items())
    lines = lines_of(text)
    assert set(lines) == set(places(tomllib.loads(text)))
    assert [lines["t", number] for number in range(len(tables))] == headers
