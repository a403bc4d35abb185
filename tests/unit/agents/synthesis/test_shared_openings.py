"""Acting and refusing share their openings: the user's words do not tell the decision, the record does."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from agents.synthesizer.builtin import synthesize
from agents.synthesizer.corpus import masked, read_corpus
from agents.synthesizer.scenario_extraction import Template, calls_of, extract_template
from agents.synthesizer.selection import in_turn
from agents.synthesizer.shared_openings import PAIR, share_openings
from agents.transcript import transcript, transcripts
from store.types import Message, Trajectory
from tests.unit.agents.synthesis.conversations import (
    SYSTEM,
    call,
    capability,
    conversation,
    demonstrations,
    environment_class,
    order,
    play,
    refusal,
    say,
    user,
)


def cancelled(number: str, *head: Any, note: str = "") -> Trajectory:
    arguments = {"order_id": number} | ({"note": note} if note else {})
    return conversation(
        f"cancelled {number}",
        *(head or [user(f"Hello! I want to cancel order {number}, I am C34.")]),
        call("get_order", order(number, "open"), "c0", order_id=number),
        call("cancel_order", {"ok": True}, **arguments),
        say(f"Order {number} is cancelled."),
    )


def share(
    *trajectories: Trajectory, omitted: tuple[str, ...] = (), seed: int = 0
) -> tuple[list[Template], list[Template]]:
    corpus = read_corpus(transcripts(trajectories), {row.id for row in trajectories})
    templates: list[Any] = [extract_template(transcript(row), corpus) for row in trajectories]
    assert all(isinstance(template, dict) for template in templates)
    return share_openings(templates, random.Random(seed), omitted)


def test_each_opening_is_in_as_many_acting_templates_as_refusing_ones() -> None:
    unpaired, pairs = share(*(refusal(f"W10{n}") for n in range(4)), *(cancelled(f"W20{n}") for n in range(2)))
    assert unpaired == []
    openings = Counter((masked(template["opening"][0]), template["refusal"]) for template in pairs)
    counts = zip(_texts(), (4, 2), strict=True)
    assert openings == {(masked(text), decision): count for text, count in counts for decision in (True, False)}
    for number in {template[PAIR] for template in pairs}:
        pair = [template for template in pairs if template[PAIR] == number]
        assert len({masked(template["opening"][0]) for template in pair}) == 1
        assert [template["refusal"] for template in pair] == [False, True]
    for template in pairs:
        first, *_ = calls_of(template["steps"])
        assert first["args"]["order_id"] in template["opening"][0]
        assert first["result"]["order_id"] == first["args"]["order_id"]


def test_both_of_a_pair_come_in_the_same_turn() -> None:
    _, pairs = share(*(refusal(f"W10{n}") for n in range(4)), *(cancelled(f"W20{n}") for n in range(4)))
    drafts = list(in_turn([{**template, "control": False} for template in pairs], random.Random(0)))
    assert len(drafts) == 16
    assert [draft[PAIR] for draft in drafts[::2]] == [draft[PAIR] for draft in drafts[1::2]]


def _texts() -> list[str]:
    return ["I am C12. Please cancel order W100.", "Hello! I want to cancel order W200, I am C34."]


def test_no_opening_is_lost() -> None:
    texts = ["Please cancel order {}.", "I want to cancel order {}.", "Hi, cancel order {}.", "Hello, cancel order {}."]
    rows = [cancelled(f"W20{n}", user(text.format(f"W20{n}"))) for n, text in enumerate(texts[:2])]
    _, pairs = share(*(refusal(f"W10{n}", text=text) for n, text in enumerate(texts[2:])), *rows)
    openings = Counter((masked(template["opening"][0]), template["refusal"]) for template in pairs)
    assert openings == {(masked(text.format("W1")), decision): 1 for text in texts for decision in (True, False)}
    assert {name for template in pairs for name in template["from"][:1]} == {
        "refused W100",
        "refused W101",
        "cancelled W200",
        "cancelled W201",
    }


@pytest.mark.parametrize("seed", range(5))
def test_an_opening_goes_to_the_conversation_that_can_have_it(seed: int) -> None:
    row = conversation(
        "needing",
        user("I am C34. Please cancel order W200."),
        call("get_order", order("W200", "open"), "c0", order_id="W200"),
        call("cancel_order", {"ok": True}, order_id="W200", customer_id="C34"),
        say("Order W200 is cancelled."),
    )
    other_row = cancelled("W201", user("Please cancel order W201."))
    _, pairs = share(*(refusal(f"W10{n}", text="Please cancel order {}.") for n in range(2)), row, other_row, seed=seed)
    assert sum(template["from"][0] != "needing" for template in pairs if not template["refusal"]) == 3
    assert len(pairs) == 8


def test_an_order_that_is_named_only_when_asked_moves_with_question_and_answer() -> None:
    head = [user("Hi, I am C34. Please cancel my order."), say("Which order?"), user("It is W200.")]
    _, pairs = share(*(refusal(f"W10{n}") for n in range(2)), cancelled("W200", *head))
    moved_templates = [
        template for template in pairs if template["opening"] == ["Hi, I am C12. Please cancel my order."]
    ]
    assert moved_templates
    for template in moved_templates:
        first, *_ = calls_of(template["steps"])
        assert template["steps"][0] == {
            "calls": [],
            "say": "Which order?",
            "reply": f"It is {first['args']['order_id']}.",
        }


def test_an_opening_with_a_date_stays() -> None:
    text = "Please cancel order {} by 2026-03-12."
    _, pairs = share(refusal("W100", text=text), cancelled("W200", user(text.format("W200"))))
    assert pairs == []


def test_an_opening_with_two_codes_of_one_kind_stays() -> None:
    """By their order, the buyer would become the recipient."""
    _, pairs = share(
        refusal("W100", text="I am C12. Please cancel order {} for C13."),
        cancelled("W200", user("Please cancel order W200 for C35, I am C34.")),
    )
    assert pairs == []


def test_a_word_with_a_digit_that_no_record_has_is_not_renamed() -> None:
    _, pairs = share(
        refusal("W100", text="I want to cancel order {}."), cancelled("W200", user("Cancel mp3 order W200."))
    )
    assert {(template["opening"][0], template["refusal"]) for template in pairs} >= {("Cancel mp3 order W100.", True)}


def test_a_fact_that_is_reported_before_the_first_call_stays() -> None:
    question = "The refund takes 5 days. Shall I go on?"
    row = cancelled("W200", user("Please cancel order W200."), say(question), user("Please."))
    row = dataclasses.replace(row, messages=[{"role": "system", "content": "Refunds take 5 days."}, *row.messages[1:]])
    unpaired, pairs = share(refusal("W100", text="Please cancel order {}."), cancelled("W201"), row)
    assert [template["from"] for template in unpaired] == [[row.id]]
    assert question not in str(pairs)


@pytest.mark.parametrize(
    ("acted_on", "refused_on"),
    [
        ("Please cancel order {}.", "Please cancel order {} for half the price."),
        ("Please cancel the kettle of order {}.", "Please cancel the lamp of order {}."),
        ("This is Anna. Please cancel order {}.", "This is Boris. Please cancel order {}."),
        ("Please cancel order {}, it is still open.", "Please cancel order {}."),
        ("Please cancel order {}, it was a gift.", "Please cancel order {}."),
        ("Please cancel the visit for order {}.", "Please cancel order {}."),
        ("Please cancel order {} for two weeks.", "Please cancel order {} for three days."),
        ("Please cancel the 3 pm slot of order {}.", "Please cancel the 5 pm slot of order {}."),
        ("Please cancel order {} from Oslo to Rome.", "Please cancel order {} from Rome to Oslo."),
        ("Please cancel the iPhone15 of order {}.", "Please cancel the Galaxy22 of order {}."),
    ],
)
def test_openings_that_differ_in_what_they_ask_for_stay(acted_on: str, refused_on: str) -> None:
    rows = [cancelled(f"W20{n}", user(acted_on.format(f"W20{n}"))) for n in range(3)]
    unpaired, pairs = share(*(refusal(f"W10{n}", text=refused_on) for n in range(3)), *rows)
    assert pairs == []
    assert len(unpaired) == 6


@pytest.mark.parametrize(
    "text",
    [
        "Good morning, could you cancel my order {}, please?",
        "I'd like to cancel order {}.",
        "Customer C12 here. I need you to cancel the order for me, it is {}.",
    ],
)
def test_openings_that_differ_in_neutral_words_only_are_shared(text: str) -> None:
    _, pairs = share(*(refusal(f"W10{n}", text=text) for n in range(3)), *(cancelled(f"W20{n}") for n in range(3)))
    decisions = {
        template["refusal"] for template in pairs if masked(template["opening"][0]) == masked(text.format("W1"))
    }
    assert decisions == {True, False}


def test_a_refusal_of_one_request_among_several_stays() -> None:
    compound = conversation(
        "compound",
        user("I am C12. Please cancel order W300, and order W301."),
        call("get_order", order("W300", "sent"), "c0", order_id="W300"),
        call("get_order", order("W301", "sent"), "c1", order_id="W301"),
        say("Orders W300 and W301 are sent, so I cannot cancel them."),
    )
    unpaired, pairs = share(*(refusal(f"W10{n}") for n in range(3)), cancelled("W200"), compound)
    assert [template["from"] for template in unpaired] == [["compound"]]
    assert not any(", and" in template["opening"][0] for template in pairs)


def test_an_opening_without_an_identifier_that_the_write_needs_is_not_given_to_it() -> None:
    rows = [
        conversation(
            f"cancelled W20{n}",
            user(f"I am C34. Please cancel order W20{n}."),
            call("get_order", order(f"W20{n}", "open"), "c0", order_id=f"W20{n}"),
            call("cancel_order", {"ok": True}, order_id=f"W20{n}", customer_id="C34"),
            say(f"Order W20{n} is cancelled."),
        )
        for n in range(3)
    ]
    _, pairs = share(*(refusal(f"W10{n}", text="Please cancel order {}.") for n in range(3)), *rows)
    assert pairs
    assert all(template["opening"][0].startswith("I am C") for template in pairs)


@pytest.mark.parametrize(
    ("question", "text", "is_shared"),
    [("Is it your own order?", "Please cancel order W200.", False), ("Which order?", "Please cancel my order.", True)],
)
def test_a_question_of_one_policy_is_not_asked_under_another_one(question: str, text: str, is_shared: bool) -> None:
    reply = "It is my order." if "own" in question else "It is W200."
    row = cancelled("W200", user(text), say(question), user(reply))
    for system, is_expected in ((SYSTEM, True), (f"{SYSTEM} Ask first whose order it is.", is_shared)):
        message: Message = {"role": "system", "content": system}
        _, pairs = share(refusal("W100"), dataclasses.replace(row, messages=[message, *row.messages[1:]]))
        assert bool(pairs) is is_expected


@pytest.mark.parametrize(
    ("key", "other_key", "text"),
    [
        # The user writes the code of the order in small letters.
        ("W100", "W200", "Please cancel order w200."),
        # The system prompt names the order of the conversation.
        ("W100", "W200", "Please cancel the order."),
        # A key that is no code.
        ("bob34@shop.example", "ann12@shop.example", "Please cancel the order of ann12@shop.example."),
    ],
)
def test_an_opening_that_does_not_tell_what_the_read_needs_is_not_given_to_it(
    key: str, other_key: str, text: str
) -> None:
    row = cancelled(other_key, user(text))
    row = dataclasses.replace(
        row, messages=[{"role": "system", "content": f"{SYSTEM} The order is {other_key}."}, *row.messages[1:]]
    )
    _, pairs = share(
        refusal(key, text="Please cancel the order of {}." if "@" in key else "Please cancel order {}."), row
    )
    for template in pairs:
        first, *_ = calls_of(template["steps"])
        assert first["args"]["order_id"] in template["opening"][0] + template["system"]


def test_without_both_decisions_or_with_recorded_answers_only_nothing_moves() -> None:
    rows = [*(refusal(f"W10{n}") for n in range(3)), cancelled("W200")]
    for unpaired, pairs in (share(*rows[:3]), share(rows[3]), share(*rows, omitted=("get_order",))):
        assert pairs == []
        assert unpaired
    unpaired, _ = share(*rows, omitted=("get_order",))
    assert len(unpaired) == len(rows)


def test_no_opening_of_the_desk_tells_the_decision() -> None:
    name = "precondition-verification"
    environment = environment_class(synthesize(capability(name), *demonstrations(), seed=0))()
    decisions: dict[str, Counter[bool]] = {}
    for template in environment.data["templates"]:
        tools = [str(row["tool"]) for row in calls_of(template["steps"])]
        if not template["control"] and tools in (["get_order"], ["get_order", "cancel_order"]):
            decisions.setdefault(masked(template["opening"][0]), Counter())[len(tools) == 1] += 1
    assert len(decisions) >= 5
    assert all(counts[True] == counts[False] for counts in decisions.values()), decisions
    assert all(play(environment, seed).success for seed in range(100))
    assert not any(PAIR in template for template in environment.data["templates"])
