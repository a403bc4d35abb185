"""What is wrong with a user's message, judged on cases by writers who had not seen the checks.

The rules were adapted to the first file (first try: faults 28 of 50, false alarms 1 of 50) and never to the second.
Contradictions in meaning are not recognised, which half of those in the first file are.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from traced.targets.user_checks import fault_of

DATA = Path(__file__).parents[2] / "data"


def counts(file: str) -> tuple[Counter[str], Counter[str]]:
    """Return the number of cases by kind, and of those that are judged rightly."""
    cases, right = Counter[str](), Counter[str]()
    for line in (DATA / file).read_text().splitlines():
        case = json.loads(line)
        request = {key: case[key] for key in ("goal", "messages")} | {"system": case["goal"], "stops": ["###STOP###"]}
        cases[case["kind"]] += 1
        right[case["kind"]] += bool(fault_of(request, case["text"])) == (case["kind"] != "ok")
    return cases, right


@pytest.mark.parametrize(
    ("file", "minimum"),
    [
        ("user_messages_1.jsonl", {"ok": 50, "leak": 14, "loop": 12, "contradiction": 6, "role": 10}),
        ("user_messages_2.jsonl", {"ok": 44, "leak": 9, "loop": 8, "contradiction": 8, "role": 5}),
    ],
)
def test_faults_are_recognised_without_false_alarms(file: str, minimum: dict[str, int]) -> None:
    cases, right = counts(file)
    assert set(cases) == set(minimum)
    assert {kind: right[kind] >= number for kind, number in minimum.items()} == dict.fromkeys(minimum, True), right
    assert right["ok"] == cases["ok"]


def fault(text: str, *turns: str, goal: str = "") -> str:
    """Judge a message; ``turns`` are the agent's and the user's, the last one is the agent's."""
    roles = ["user" if (len(turns) - place) % 2 else "assistant" for place in range(len(turns))]
    messages: list[dict[str, Any]] = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    return fault_of({"system": goal, "goal": goal, "messages": messages, "stops": ["STOP"]}, text)


def test_each_fault_says_what_was_seen() -> None:
    assert fault("") == "it says nothing"
    assert fault("STOP", "Bye.") == ""
    assert fault("How may I help you?", "Hi!") == "it speaks as the agent: 'How may I help you'"
    assert fault("My instructions say that I am Ann.", "Hi!").startswith("it talks about its instructions: 'My instr")
    assert fault("My order number is W123456.", "Hi!") == (
        "it states 'W123456', which neither its instructions nor the conversation contain"
    )
    assert fault("It is 90042.", "Your zip code?", goal="Your zip code is 90024.").startswith("it answers '90042'")
    assert fault("My name is Bob", "Hi!", "My name is Ann", "Your name?") == "its name was 'ann' and is now 'Bob'"
    assert (
        fault("Ship it, now!", "A?", "Ship it now", "B?", "ship it now.", "C?")
        == "it says the same for 3 different messages of the agent"
    )


def test_an_agent_that_repeats_its_question_gets_the_same_answer() -> None:
    assert fault("Ship it now", "A?", "Ship it now", "A?", "Ship it now", "A?") == ""
    assert fault("Yes, please.", "A?", "Yes, please.", "B?", "Yes, please.", "C?") == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("5551234567", "It's 555-123-4567."),
        ("(555) 123-4567", "555.123.4567"),
        ("4111111111111111", "4111-1111-1111-1111"),
        ("1990-05-12", "05/12/1990"),
        ("#W2378156", "W-2378156"),
    ],
)
def test_a_value_may_be_written_otherwise(value: str, text: str) -> None:
    question = "Your phone number, order number, card number, and date of birth?"
    assert fault(text, question, goal=f"Yours is {value}.") == ""


@pytest.mark.parametrize(
    "text",
    [
        "My goal is to get a refund.",
        "I was told to ask for a refund here.",
        "Sure, thank you for your patience.",
        "The user is locked out of his account.",
        "My number is showing up correctly now.",
    ],
)
def test_what_people_say_is_no_fault(text: str) -> None:
    assert fault(text, "Hi!", "My number is 555-1234", "Anything else?", goal="My number is 555-1234.") == ""


def test_an_agent_that_asks_for_what_nobody_knows_is_not_excused() -> None:
    assert fault("I don't remember.", "A?", "I don't remember.", "B?", "I don't remember.", "C?") == ""
