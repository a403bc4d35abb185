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
from tests.unit.agents.analysis.library import LOAN, TOOLS, agent, calls, talk, user

texts = st.text(st.characters(exclude_categories=()), max_size=400)
parts = st.lists(
    st.one_of(
        texts.map(user),
        texts.map(agent),
        st.tuples(texts, texts).map(lambda pair: calls(pair[0] or "f", pair[1], a=1)),
        st.just(calls("find_loan", {"error": "no such loan"}, loan="L0")),
    ),
    max_size=40,
)
LINE = re.compile(r"m\d+ |    |\[\.\.\.\]")


def heads(rendered: RenderedConversation) -> list[int]:
    return [int(result) for result in re.findall(r"^m(\d+) ", rendered.text, re.MULTILINE)]


def test_it_reads_as_a_conversation() -> None:
    rendered = render_conversation(
        talk(user("Renew L1, please."), calls("find_loan", LOAN, loan="L1"), agent("Done.\nAnything else?")), 999
    )
    assert rendered.text.split("\n") == [
        "m1 user: Renew L1, please.",
        'm2 agent calls: find_loan({"loan": "L1"})',
        f"m3 find_loan answers: {json.dumps(LOAN)}",
        "m4 agent: Done.",
        "    Anything else?",
    ]
    assert rendered.messages == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("citation", "index"),
    [
        ("m2", 2),
        (" 2 ", 2),
        *((no, None) for no in ("m0", "m9", "", "m", "m-2", "m²", "m2, m3", "t1", "m" + "9" * 5000)),
    ],
)
def test_only_rendered_messages_can_be_cited(citation: str, index: int | None) -> None:
    assert (
        render_conversation(talk(user("Hi"), calls("find_loan", LOAN, loan="L1")), 999).message_index(citation) == index
    )


@given(parts, st.integers(80, 3000))
@settings(max_examples=150)
def test_no_text_pretends_to_be_a_message_and_none_is_over_budget(texts: list[Any], budget: int) -> None:
    rendered = render_conversation(talk(*texts), budget)
    assert token_estimate(rendered.text) <= budget
    assert all(LINE.match(line) for line in rendered.text.split("\n") if rendered.text)
    assert heads(rendered) == sorted(heads(rendered))
    assert set(heads(rendered)) == rendered.messages
    rendered.text.encode()


def test_an_oversized_conversation_keeps_beginning_errors_and_end() -> None:
    filler = [calls("search_catalogue", "x" * 300, words=f"w{n}") for n in range(60)]
    error = calls("renew_loan", {"error": "no such loan"}, loan="L7")
    full = talk(user("Renew L7."), *filler[:30], error, *filler[30:], agent("I give up."))
    rendered = render_conversation(full, 1500)
    assert "m1 user: Renew L7." in rendered.text
    assert "no such loan" in rendered.text
    assert 'renew_loan({"loan": "L7"})' in rendered.text
    assert rendered.text.endswith("I give up.")
    assert GAP_MARK in rendered.text.split("\n")
    assert rendered.message_index("m40") is None
    assert render_conversation(full, 100_000).message_index("m40") == 40


def test_long_messages_lose_their_middle_before_whole_messages_go() -> None:
    rendered = render_conversation(talk(user("a" * 3000 + "z"), *[agent(f"{n}") for n in range(20)]), 600)
    assert len(rendered.messages) == 21
    assert re.search(r"m1 user: a+ \[\.\.\. \d+ bytes left out \.\.\.\] a+z$", rendered.text, re.MULTILINE)


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
    item = hidden(talk(user("Hi"), calls("find_loan", LOAN, loan="L1"), outcome=Outcome.FAILURE))
    assert "canary" not in render_conversation(item, 999).text + render_policy_and_tools([item], 999)


def test_policy_and_tools_are_rendered_once_and_within_budget() -> None:
    rendered = render_policy_and_tools([talk(user("Hi")), talk(user("Ho"))], 5000)
    assert rendered.count("You serve the readers of a library") == 1
    assert rendered.count("find_loan: Find a loan") == 1
    assert re.match(r"<policy [0-9a-f]{16}>\n", rendered)
    assert render_policy_and_tools([replace(talk(), messages=[], tools=[])], 99) == ""
    several_items = replace(
        talk(user("Hi")), tools=TOOLS * 1 + [{"name": f"t{n}", "description": "d" * 400} for n in range(99)]
    )
    assert token_estimate(render_policy_and_tools([several_items], 1000)) <= 1100
