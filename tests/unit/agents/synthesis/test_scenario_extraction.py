"""From a conversation to a template: what is kept, what is left out, what may be renamed."""

import random
from typing import Any

import pytest

from agents.synthesizer.composition import compose, is_compound, speech_style
from agents.synthesizer.corpus import Corpus, read_corpus
from agents.synthesizer.generalization import generalise
from agents.synthesizer.response_templates import acknowledgements, error_patterns, small_talk, usual_answers
from agents.synthesizer.scenario_extraction import NoTemplate, extract_template
from agents.tool_schemas import is_read
from agents.transcript import transcript, transcripts
from store.types import Trajectory
from tests.unit.agents.synthesis.conversations import call, conversation, demonstrations, order, say, user

BYE = "Anything else?"


def cancelling(name: str, number: str, *extra: Any) -> Trajectory:
    return conversation(
        name,
        user(f"I am C1{number[-1]}. Please cancel order {number}."),
        call("get_order", order(number, "open", fee=37), order_id=number),
        *extra,
        call("cancel_order", {"ok": True}, "c2", order_id=number),
        say(f"Order {number} is cancelled, the fee is 37. {BYE}"),
    )


def corpus_of(*trajectories: Trajectory) -> Corpus:
    return read_corpus(transcripts(trajectories), {t.id for t in trajectories})


def template_of(trajectory: Trajectory, corpus: Corpus | None = None) -> dict[str, Any]:
    template = extract_template(transcript(trajectory), corpus or corpus_of(trajectory))
    assert not isinstance(template, NoTemplate), template
    return template


def test_a_conversation_becomes_steps_writes_and_reported_facts() -> None:
    template = template_of(cancelling("t", "W1234"))
    assert [c["kind"] for step in template["steps"] for c in step["calls"]] == ["read", "write"]
    assert template["told"] == ["37"]
    assert template["refusal"] is False


def test_dead_ends_are_left_out() -> None:
    second_result = call("get_order", order("W1234", "open", fee=37), "c3", order_id="W1234")
    slip = call("get_order", {"error": "W9999 not found"}, "c4", order_id="W9999")
    template = template_of(cancelling("t", "W1234", second_result, slip))
    assert [c["tool"] for step in template["steps"] for c in step["calls"]] == ["get_order", "cancel_order"]


def at_once(*calls: Any) -> list[Any]:
    """Return the message that makes these calls together, and their answers."""
    requests, answers = zip(*calls, strict=True)
    merged = {**requests[0], "tool_calls": [request["tool_calls"][0] for request in requests]}
    return [merged, *answers]


def test_a_call_that_needs_an_answer_to_a_call_of_its_own_message_follows_it() -> None:
    lookup = call("get_order", {"order_id": "W1234", "visit": 4711}, "c1", order_id="W1234")
    visit = call("book_visit", {"ok": True}, "c2", order_id="W1234", date="4711")
    other_lookup = call("get_order", {"order_id": "W77"}, "c3", order_id="W77")
    rows = [user("Please visit W1234, as for W77."), at_once(lookup, other_lookup, visit), say("Booked.")]
    steps = template_of(conversation("t", *rows))["steps"]
    assert [[c["tool"] for c in step["calls"]] for step in steps] == [["get_order", "get_order"], ["book_visit"], []]
    # What the user has told needs no answer first.
    rows[0] = user("Please visit W1234 as 4711, as for W77.")
    steps = template_of(conversation("t", *rows))["steps"]
    assert [len(step["calls"]) for step in steps] == [3, 0]


def test_an_error_on_a_known_identifier_stays() -> None:
    busy = call("cancel_order", {"error": "busy"}, "c3", order_id="W1234")
    template = template_of(cancelling("t", "W1234", busy))
    assert [c["kind"] for step in template["steps"] for c in step["calls"]] == ["read", "error", "write"]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([say("Hello."), user("Hi.")], "opening"),
        ([user("Hi."), say("Hello."), user("Bye.")], "checked"),
        ([user("Hi."), call("get_order", {})[:1], say("Hm.")], "never answered"),
        ([user("Hi."), call("get_order", order("W5"), order_id="W5"), say("W5.")], "nobody had told"),
    ],
)
def test_an_unusable_conversation_gives_a_reason(parts: list[Any], reason: str) -> None:
    malformed = conversation("t", *parts)
    template = extract_template(transcript(malformed), corpus_of(malformed))
    assert isinstance(template, NoTemplate)
    assert reason in template.reason


def test_an_identifier_that_only_the_greeting_names_is_renamed_too() -> None:
    other_items = [cancelling(f"o{i}", f"W123{i}") for i in range(4)]
    customer = conversation(
        "c", user("I am C77."), call("get_order", {"order_id": "W1", "customer_id": "C77"}), say("W1.")
    )
    corpus = corpus_of(*other_items, customer)
    template = generalise(template_of(other_items[0], corpus), corpus, random.Random(0))
    assert {"W1230", "C10"} <= set(template["ids"])


def test_no_record_is_imputed_to_an_omitted_tool() -> None:
    rows = [cancelling(f"o{n}", f"W123{n}") for n in range(4)]
    rows.append(cancelling("t", "W1239", say("Not W7777?"), user("No, W1239, not W7777.")))
    corpus = corpus_of(*rows)
    template = template_of(rows[-1], corpus)
    extra = generalise(template, corpus, random.Random(0))["extra"]
    assert [(record["tool"], record["args"]) for record in extra] == [("get_order", {"order_id": "W7777"})]
    assert generalise(template, corpus, random.Random(0), ["get_order"])["extra"] == []


def test_amounts_that_the_user_or_the_policy_names_stay() -> None:
    several_items = [
        conversation(
            f"t{fee}",
            user("What does W1 cost?" if fee != 40 else "Does W1 cost 40?"),
            call("get_order", order("W1", fee=fee), order_id="W1"),
            say(f"It costs {fee}."),
        )
        for fee in range(30, 50)
    ]
    corpus = corpus_of(*several_items)
    free = generalise(template_of(several_items[0], corpus), corpus, random.Random(0))
    assert [group["values"] for group in free["numbers"]] == [["30"]]
    fixed = next(t for t in several_items if t.id == "t40")
    # told to nobody who did not know it, so there is nothing to lift; the amount itself is what matters here
    assert isinstance(extract_template(transcript(fixed), corpus), NoTemplate)


def test_dates_stay_within_the_days_of_the_recordings() -> None:
    prompts = ["Today is 2026-03-10.", "Today is 2026-03-01.", "Today is 2026-03-31."]
    several_items = [
        conversation(
            f"t{i}", user("Visit for W1."), call("book_visit", {"ok": True}, order_id="W1"), say("Ok."), system=p
        )
        for i, p in enumerate(prompts)
    ]
    corpus = corpus_of(*several_items)
    assert generalise(template_of(several_items[0], corpus), corpus, random.Random(0))["shift"] == [-9, 21, 1]
    weekly = conversation("w", user("Book W1 on Monday."), call("book_visit", {"ok": True}, order_id="W1"), say("Ok."))
    assert generalise(template_of(weekly, corpus), corpus, random.Random(0))["shift"] == [-1, 3, 7]
    monthly = conversation(
        "m", user("Book W1 in a month."), call("book_visit", {"ok": True}, order_id="W1"), say("Ok.")
    )
    assert generalise(template_of(monthly, corpus), corpus, random.Random(0))["shift"] == [0, 0, 1]


def test_error_formats_come_from_the_target() -> None:
    slip = call("get_order", {"error": "no order W9999 not found"}, "c4", order_id="W9999")
    patterns = error_patterns(corpus_of(cancelling("t", "W1234", slip)))
    assert patterns["unknown"] == {"get_order": '{"error":"no order {order_id} not found"}'}
    assert patterns["unknown_default"] == '{"error":"no order {value} not found"}'
    plain_text = conversation("p", user("W1?"), call("get_order", "Error: order not found", order_id="W1"), say("No."))
    assert error_patterns(corpus_of(plain_text))["tool"] == "Error: unknown tool {tool}"


def test_acknowledgements_and_calendar_days_are_mined() -> None:
    days = [
        conversation(
            f"t{day}",
            user("When?"),
            call("get_day", {"date": f"2026-03-0{day}", "open": day != 3}, date=f"2026-03-0{day}"),
            call("book_visit", {"ok": True, "order": "W1"}, "c2", order_id="W1", date=f"2026-03-0{day}"),
            say("Booked."),
        )
        for day in range(1, 6)
    ]
    corpus = corpus_of(*days)
    assert usual_answers(corpus) == {"get_day": '{"date":"{date}","open":true}'}
    assert acknowledgements(corpus) == {"book_visit": '{"ok":true,"order":"{order_id}"}'}


def test_small_talk_keeps_the_letters_of_identifiers() -> None:
    question = [
        conversation(f"t{i}", user("Cancel it."), say("Which order is it?"), user(f"It is order W12{i}."), say("Ok."))
        for i in range(3)
    ]
    assert small_talk(transcripts(question)) == [(["is", "it", "order", "which"], "It is order {W}.")]


def test_reads_and_writes_are_distinguished_by_verb() -> None:
    assert [is_read(name) for name in ("get_order", "searchFlights", "think", "cancel_order")] == [
        True,
        False,
        True,
        False,
    ]


def test_compounds_join_two_requests_of_one_customer_as_users_do() -> None:
    trajectories = [t for t in demonstrations()[0] if t.outcome == "success"]
    corpus = corpus_of(*trajectories)
    style = speech_style([t.user[0].text for t in corpus.transcripts], [["anything", "else"]])
    assert style.phrases == ["Also, ", "And also, ", "I have a second request: "]
    singles = [
        t for t in map(lambda x: extract_template(x, corpus), corpus.transcripts) if not isinstance(t, NoTemplate)
    ]
    singles = [t for t in singles if not is_compound(t["opening"][0], style.phrases)]
    rng = random.Random(0)
    instance = [compose(single, two, style, rng) for single in singles[:25] for two in singles[25:60]]
    compound = [template for template in instance if template is not None]
    assert len(compound) > 20
    for template in compound:
        assert is_compound(template["opening"][0], style.phrases)
        assert template["steps"][-1]["say"].count(BYE) == 1
        customers = {
            word.strip(".") for word in template["opening"][0].split() if word.startswith("C") and word[1:2].isdigit()
        }
        assert len(customers) == 1


@pytest.mark.parametrize("result", ["Orders:\nW1234\nW5678", '{"order":"\N{NUMERO SIGN}W1234"}'])
def test_a_code_after_a_line_end_or_another_sign_in_an_answer_is_known(result: Any) -> None:
    search, cancellation = call("find_orders", result), call("cancel_order", {"ok": True}, "c2", order_id="W1234")
    one_by_one = conversation("t", user("Please cancel my order."), search, cancellation, say("It is cancelled."))
    together = conversation("t", user("Please cancel it."), at_once(search, cancellation), say("It is cancelled."))
    for row in (one_by_one, together):
        assert [len(step["calls"]) for step in template_of(row)["steps"]] == [1, 1, 0]
