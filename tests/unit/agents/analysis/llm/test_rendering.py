"""Conversations as text: nothing but what was said and called, within the budget, and no line that is not a message."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.analyst.llm.rendering import (
    GAP_MARK,
    RenderedConversation,
    render_conversation,
    render_policy_and_tools,
    token_estimate,
)
from store.types import Outcome, Trajectory
from tests.unit.agents.analysis.library import LOAN, TOOLS, calls, says, talk, user

texts = st.text(st.characters(exclude_categories=()), max_size=400)
parts = st.lists(
    st.one_of(
        texts.map(user),
        texts.map(says),
        st.tuples(texts, texts).map(lambda pair: calls(pair[0] or "f", pair[1], a=1)),
        st.just(calls("find_loan", {"error": "no such loan"}, loan="L0")),
    ),
    max_size=40,
)
LINE = re.compile(r"m\d+ |    |\[\.\.\.\]")


def heads(told: RenderedConversation) -> list[int]:
    return [int(found) for found in re.findall(r"^m(\d+) ", told.text, re.MULTILINE)]


def test_it_reads_as_a_conversation() -> None:
    told = render_conversation(
        talk(user("Renew L1, please."), calls("find_loan", LOAN, loan="L1"), says("Done.\nAnything else?")), 999
    )
    assert told.text.split("\n") == [
        "m1 user: Renew L1, please.",
        'm2 agent calls: find_loan({"loan": "L1"})',
        f"m3 find_loan answers: {json.dumps(LOAN)}",
        "m4 agent: Done.",
        "    Anything else?",
    ]
    assert told.messages == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("cited", "index"),
    [
        ("m2", 2),
        (" 2 ", 2),
        *((no, None) for no in ("m0", "m9", "", "m", "m-2", "m²", "m2, m3", "t1", "m" + "9" * 5000)),
    ],
)
def test_only_what_was_shown_can_be_cited(cited: str, index: int | None) -> None:
    assert render_conversation(talk(user("Hi"), calls("find_loan", LOAN, loan="L1")), 999).message_index(cited) == index


@given(parts, st.integers(80, 3000))
@settings(max_examples=150)
def test_no_text_pretends_to_be_a_message_and_none_is_over_budget(said: list[Any], budget: int) -> None:
    told = render_conversation(talk(*said), budget)
    assert token_estimate(told.text) <= budget
    assert all(LINE.match(line) for line in told.text.split("\n") if told.text)
    assert heads(told) == sorted(heads(told))
    assert set(heads(told)) == told.messages
    told.text.encode()


def test_what_does_not_fit_leaves_the_beginning_the_errors_and_the_end() -> None:
    filler = [calls("search_catalogue", "x" * 300, words=f"w{n}") for n in range(60)]
    error = calls("renew_loan", {"error": "no such loan"}, loan="L7")
    whole = talk(user("Renew L7."), *filler[:30], error, *filler[30:], says("I give up."))
    told = render_conversation(whole, 1500)
    assert "m1 user: Renew L7." in told.text
    assert "no such loan" in told.text
    assert 'renew_loan({"loan": "L7"})' in told.text
    assert told.text.endswith("I give up.")
    assert GAP_MARK in told.text.split("\n")
    assert told.message_index("m40") is None
    assert render_conversation(whole, 100_000).message_index("m40") == 40


def test_long_messages_lose_their_middle_before_whole_messages_go() -> None:
    told = render_conversation(talk(user("a" * 3000 + "z"), *[says(f"{n}") for n in range(20)]), 600)
    assert len(told.messages) == 21
    assert re.search(r"m1 user: a+ \[\.\.\. \d+ bytes left out \.\.\.\] a+z$", told.text, re.MULTILINE)


def hidden(trajectory: Trajectory) -> Trajectory:
    return replace(
        trajectory,
        id="canary",
        source="canary",
        task_id="canary",
        split="canary",
        model="canary",
        parts={"canary": 1.0},
        detail="canary",
        messages=[{**message, "canary": "canary", "reward": "canary"} for message in trajectory.messages],
    )


def test_nothing_privileged_is_in_it() -> None:
    one = hidden(talk(user("Hi"), calls("find_loan", LOAN, loan="L1"), outcome=Outcome.FAILURE))
    assert "canary" not in render_conversation(one, 999).text + render_policy_and_tools([one], 999)


def test_policy_and_tools_are_told_once_and_within_their_budget() -> None:
    told = render_policy_and_tools([talk(user("Hi")), talk(user("Ho"))], 5000)
    assert told.count("You serve the readers of a library") == 1
    assert told.count("find_loan: Find a loan") == 1
    assert re.match(r"<policy [0-9a-f]{16}>\n", told)
    assert render_policy_and_tools([replace(talk(), messages=[], tools=[])], 99) == ""
    many = replace(talk(user("Hi")), tools=TOOLS * 1 + [{"name": f"t{n}", "description": "d" * 400} for n in range(99)])
    assert token_estimate(render_policy_and_tools([many], 1000)) <= 1100
