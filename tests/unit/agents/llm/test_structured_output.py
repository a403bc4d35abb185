"""The one JSON object of an answer: found in prose, mended where that is unambiguous, never guessed."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.llm.structured_output import Unreadable, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=6), VALUES, max_size=4)
PROSE = st.text(alphabet=st.characters(exclude_characters='{}"'), max_size=30)


@given(OBJECTS, PROSE, PROSE, st.sampled_from([None, 2]))
def test_an_object_is_parsed_inside_any_prose(
    payload: dict[str, object], prefix: str, suffix: str, indent: int | None
) -> None:
    if prefix.lstrip().startswith("["):
        prefix = ""
    assert parse_object(f"{prefix}{json.dumps(payload, indent=indent)}{suffix}") == payload


@given(st.text(max_size=200))
def test_any_text_is_an_object_or_is_unreadable(text: str) -> None:
    with suppress(Unreadable):
        assert isinstance(parse_object(text), dict)


@pytest.mark.parametrize(
    "answer",
    [
        '{"a": [1, {"b": "x,]}"}]}',
        'Sure!\n```json\n{"a": [1, {"b": "x,]}"}]}\n```\nBye',
        '```\n{"a": [1, {"b": "x,]}"},],}\n```',
        '<think>{"a": 2} or {"a": 3}?</think>\n{"a": [1, {"b": "x,]}"}]}',
        'Of the set {x, y} I choose {"a": [1, {"b": "x,]}"}, ] , }',
    ],
)
def test_text_around_an_object_is_ignored(answer: str) -> None:
    assert parse_object(answer) == {"a": [1, {"b": "x,]}"}]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no JSON object"),
        ("I would say lacking.", "no JSON object"),
        ('[{"a": 1}]', "no JSON object"),
        ('{"a": 1} or rather {"a": 2}', "2 JSON objects"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": {"b": 1}, "c": ', "cannot be read"),  # what is inside of it is no answer
        ("{'a': 1}", "no JSON object"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a": "' + "x" * 5_000_000, "too long"),
    ],
)
def test_nothing_is_guessed(answer: str, reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        parse_object(answer)
