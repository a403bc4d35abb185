"""The parsers: relative dates, clauses and identifiers, transcripts; whatever is typed, nothing raises."""

import json
from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.analyst.language import clauses, identifiers, last_mention, pairs, resolve, today_in, verb_stems
from agents.analyst.values import leaves, siblings
from agents.transcript import transcript
from tests.unit.agents.analysis.library import agent, calls, talk, user

days = st.dates(date(2000, 1, 1), date(2090, 1, 1))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(days, st.integers(0, 200))
def test_in_so_many_days(today: date, count: int) -> None:
    assert resolve(f"Come in {count} days.", today) == {today + timedelta(days=count)}


@given(days)
def test_a_weekday_is_one_of_the_coming_seven_days(today: date) -> None:
    (result,) = resolve("on Friday", today)
    assert result.weekday() == 4
    assert 1 <= (result - today).days <= 7
    assert result in resolve("next Friday", today)


@given(st.text(), days)
def test_any_text_can_be_read(text: str, today: date) -> None:
    resolve(text, today)
    today_in(text)
    verb_stems(text)
    pairs(text)
    assert all(code in text for code in identifiers(text))
    assert all(clause.strip() == clause and clause in text for clause in clauses(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Today is 2026-03-14.", date(2026, 3, 14)),
        ("The current time is 2024-05-15 15:00:00 EST.", date(2024, 5, 15)),
        ("Today is 2026-13-40. Now it is 2026-01-02", date(2026, 1, 2)),
        ("Delivered 2026-03-14.", None),
    ],
)
def test_today_as_prompts_state_it(text: str, expected: date | None) -> None:
    assert today_in(text) == expected


def test_clauses_and_identifiers_of_a_compound_request() -> None:
    text = (
        "Hi, I am C335. Please return the shelf from order W0428, it is late. And also, please pick up W7136 in 2 days."
    )
    assert clauses(text)[1:] == [
        "Please return the shelf from order W0428, it is late.",
        "please pick up W7136 in 2 days.",
    ]
    assert identifiers(text) == {"C335", "W0428", "W7136"}
    assert identifiers("on May 20th 2024-05-20 at 11am for $1000") == set()


def test_mentions_skip_excluded_phrases() -> None:
    assert last_mention("the blue one instead of the red one", "red") is None
    assert last_mention("a one-way trip", "one_way") == 2
    assert last_mention("bored", "red") is None


@given(json_values)
def test_sibling_records_are_read_from_any_value(value: object) -> None:
    assert all(len(group) >= 2 for group in siblings(value))
    assert all(not isinstance(leaf, (dict, list)) for _, leaf in leaves(value))


@given(json_values, st.text(max_size=20))
def test_any_answer_and_any_arguments_make_a_transcript(answer: object, raw: str) -> None:
    trajectory = talk(user("Hi"), calls("find_loan", json.dumps(answer)), agent("Bye"))
    trajectory.messages[2]["tool_calls"][0]["function"]["arguments"] = raw
    (call,) = transcript(trajectory).calls
    assert call.result is not None
    assert call.result.value == answer
    assert call.raw == raw


def test_parallel_calls_get_their_own_answers_in_any_order() -> None:
    first, first_answer = calls("find_loan", {"n": 1}, loan="L1")
    second, second_answer = calls("find_loan", {"n": 2}, loan="L2")
    first["tool_calls"][0]["id"], first_answer["tool_call_id"] = "a", "a"
    second["tool_calls"][0]["id"], second_answer["tool_call_id"] = "b", "b"
    pair = {"role": "assistant", "content": None, "tool_calls": first["tool_calls"] + second["tool_calls"]}
    conversation = transcript(talk(pair, second_answer, first_answer))
    assert [call.result.value for call in conversation.calls if call.result] == [{"n": 1}, {"n": 2}]


def test_stop_marks_and_content_parts_are_read_as_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "image_url", "image_url": {}}]}
    conversation = transcript(talk(parts, user("###STOP###"), user("Bye ###STOP###")))
    assert [message.text for message in conversation.user] == ["Hello", "Bye"]
