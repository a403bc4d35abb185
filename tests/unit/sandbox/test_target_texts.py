"""What admission compares with the target's conversations: how much of the policy, and the form of the answers."""

import json
from typing import Any

import pytest

from sandbox.admission.target_texts import TargetTexts, answer_form, odd_answers, policy_share, tool_answers
from store.types import Outcome
from tests.unit.targets.conversations import conversation
from traced.pipeline.admit import target_texts

POLICY = """You book rooms. Ask for the number of guests before you search. A paid booking cannot be changed.
Никогда не отменяйте бронирование без подтверждения гостя."""
ANSWER = json.dumps({"room": "R7", "guests": 2, "price": 80})


def test_the_share_of_a_policy_that_a_prompt_has() -> None:
    assert policy_share(POLICY, [POLICY]) == 1.0
    assert (
        policy_share(f"Today is Monday.\n\n{POLICY.upper()}", ["Another policy that nobody wrote here.", POLICY]) == 1.0
    )
    assert policy_share("You are a helpful assistant that books rooms.", [POLICY]) == 0.0
    first_half = POLICY.splitlines()[0]
    assert 0.6 < policy_share(first_half, [POLICY]) < 0.9
    assert policy_share("anything", []) == 1.0
    assert policy_share("Sei höflich", ["Sei höflich"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "examples", "is_odd"),
    [
        ("ANSWER|R7|80", [ANSWER], True),
        (ANSWER, ["room R7 is free"], True),
        (json.dumps([1]), [ANSWER], True),
        (ANSWER, [ANSWER], False),
        (json.dumps({"room": "R9"}), [ANSWER], False),
        (json.dumps({"status": "ok", "id": 4, "room": "R9"}), [ANSWER], True),
        # The keys are ids of records.
        (json.dumps({"R4": "free"}), [json.dumps({f"R{n}": "free"}) for n in range(10, 20)], False),
        ("room R9 is taken", ["room R7 is free", ANSWER], False),
        ("anything", [], False),
    ],
)
def test_an_answer_in_a_form_that_the_target_never_shows(answer: str, examples: list[str], is_odd: bool) -> None:
    complaints = odd_answers([("find", answer), ("find", answer), ("unseen", answer)], {"find": examples})
    assert len(complaints) == is_odd
    assert all(text.startswith("find answers ") for text in complaints)


def test_a_complaint_names_the_form_of_the_target() -> None:
    (complaint,) = odd_answers([("find", "ANSWER|R7|80")], {"find": [ANSWER]})
    assert complaint == (
        "find answers 'ANSWER|R7|80'; the target's answers are object with keys such as guests, price, room"
    )


def test_forms_of_answers() -> None:
    forms = [answer_form(text).kind for text in (ANSWER, "[]", "3", "null", '"x"', "not found", "")]
    assert forms == ["object", "array", "value", "value", "value", "text", "text"]


def test_the_texts_of_conversations() -> None:
    def call(number: int) -> dict[str, Any]:
        function = {"name": f"tool {number}", "arguments": "{}"}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        }

    def reply(content: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": "c", "content": content}

    # The same id is used twice.
    messages = [
        {"role": "system", "content": POLICY},
        {"role": "user", "content": "hello"},
        *(call(1), reply("one")),
        *(call(2), reply("two")),
        *(call(2), reply("Error: none")),
    ]
    texts = target_texts([conversation(1, Outcome.SUCCESS, messages=messages), conversation(2, Outcome.SUCCESS)])
    # The second conversation has no system prompt.
    assert texts == TargetTexts([POLICY, ""], {"tool 1": ["one"], "tool 2": ["two"]})
    assert policy_share("", texts.prompts) == 1.0
    parts = [{"type": "text", "text": ANSWER}]
    messages = [
        call(1),
        {"role": "tool", "tool_call_id": "c", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]},
    ]
    assert target_texts([conversation(3, Outcome.SUCCESS, messages=messages)]).answers == {"tool 1": [ANSWER]}
    assert tool_answers(call(1), [reply("one"), {"role": "user", "content": "?"}]) == [("tool 1", "one")]
