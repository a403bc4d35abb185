"""The runtime by hand: one template, every reward level, the target's errors, the user's replies."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.synthesizer.runtime import TemplateEnvironment, canonical, likeness, mentions, question_words
from tests.unit.agents.synthesis.conversations import TOOLS, order


def recorded_call(tool: str, result: Any, kind: str, **args: str) -> dict[str, Any]:
    return {"tool": tool, "args": args, "result": result, "style": "compact", "kind": kind}


def template(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "from": ["t1"],
        "system": 0,
        "opening": ["I am C12. Please cancel order W1234."],
        "steps": [
            {"calls": [recorded_call("get_order", order("W1234", fee=37), "read", order_id="W1234")]},
            {"calls": [recorded_call("cancel_order", {"ok": True}, "write", order_id="W1234")]},
            {"calls": [], "say": "Order W1234 is cancelled, the fee is 37. Anything else?"},
        ],
        "refusal": False,
        "reads_first": False,
        "control": False,
        "told": ["37"],
        "extra": [],
        "grow": [],
        "ids": ["W1234", "C12"],
        "names": [],
        "numbers": [],
        "shift": [0, 0, 1],
        "reorder": True,
    }
    return base | changes


def environment(*templates: dict[str, Any], **changes: Any) -> TemplateEnvironment:
    data: dict[str, Any] = {
        "capability": "multi-step-completion",
        "tools": TOOLS,
        "writes": ["book_visit", "cancel_order"],
        "free_text": {},
        "name_arguments": {},
        "incidental": [],
        "prefixes": {"get_order": {"order_id": ["W"]}, "cancel_order": {"order_id": ["W"]}},
        "errors": {
            "unknown": {},
            "unknown_default": '{"error":"{value} not found"}',
            "tool": '{"error":"unknown tool {tool}"}',
            "json": '{"error":"arguments are not JSON"}',
            "arguments": '{"error":"{tool} needs {needed}"}',
        },
        "acks": {"cancel_order": '{"ok":true}', "book_visit": '{"ok":true}'},
        "usual": {},
        "farewells": [["anything", "else"]],
        "chat": [[["go", "ahead", "i", "shall"], "Yes, please."], [["is", "it", "order", "which"], "It is order {W}."]],
        "pools": [],
        "systems": ["You serve a shop."],
        "strata": [{"kind": "act", "weight": 1.0, "templates": list(range(len(templates)))}],
        "templates": list(templates),
    }
    return TemplateEnvironment(data | changes)


def calls(*instance: tuple[str, dict[str, Any] | str]) -> dict[str, Any]:
    listing = [
        {
            "id": f"x{number}",
            "type": "function",
            "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)},
        }
        for number, (name, a) in enumerate(instance)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listing}


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def order_of(environment: TemplateEnvironment) -> str:
    return environment.scenario.opening[0].rstrip(".").split()[-1]


def test_the_recorded_solution_reaches_one_and_its_rename_keeps_the_shape() -> None:
    env = environment(template())
    observed = set()
    for seed in range(50):
        task = env.reset(seed)
        assert task.messages[0]["content"].startswith("I am C")
        assert len(order_of(env)) == 5
        observed.add(order_of(env))
        for message in env.oracle():
            env.step(message)
        assert env.done
        assert env.score().success
    assert len(observed) > 40


def test_every_level_of_the_reward() -> None:
    env = environment(template())

    def score(*messages: dict[str, Any]) -> float:
        for message in messages:
            env.step(message)
        return env.score().reward

    def fresh() -> dict[str, str]:
        env.reset(3)
        return {"order_id": order_of(env)}

    fresh()
    assert score(say("Done, success, everything is cancelled.")) == 0.0
    assert score(calls(("get_order", fresh())), say("Hm.")) == 0.2
    assert score(calls(("cancel_order", fresh())), say("It is cancelled.")) == 0.8
    missing = fresh()
    assert score(calls(("cancel_order", missing)), calls(("cancel_order", missing)), say("37")) == 0.2
    missing = fresh()
    visit = {**missing, "date": "2026-03-11"}
    assert score(calls(("cancel_order", missing)), calls(("book_visit", visit)), say("37")) == 0.2
    assert score(calls(("cancel_order", fresh())), say("The fee is 37.")) == 1.0


def test_a_lucky_write_does_not_pass_where_reading_first_is_learnt() -> None:
    env = environment(template(reads_first=True))
    env.reset(1)
    env.step(calls(("cancel_order", {"order_id": order_of(env)})))
    env.step(calls(("get_order", {"order_id": order_of(env)})))
    env.step(say("The fee is 37."))
    assert env.score().reward == 0.5
    assert not env.score().success


def refusing() -> TemplateEnvironment:
    steps = [
        {"calls": [recorded_call("get_order", order("W1234", "shipped", note="by rail"), "read", order_id="W1234")]},
        {"calls": [], "say": "Order W1234 is shipped, so I cannot cancel it."},
    ]
    return environment(template(steps=steps, refusal=True, told=["shipped"]))


def test_a_refusal_needs_the_read_the_reason_and_the_refusal_itself() -> None:
    environment = refusing()
    environment.reset(0)
    environment.step(say("I am sorry, I cannot do that, it is shipped."))
    assert environment.score().reward == 0.0
    for text, reward in (("It is shipped.", 0.2), ("Sorry, I cannot.", 0.2), ("I cannot, it is shipped.", 1.0)):
        environment.reset(0)
        environment.step(calls(("get_order", {"order_id": order_of(environment)})))
        environment.step(say(text))
        assert environment.score().reward == reward
    environment.reset(0)
    environment.step(
        calls(("get_order", {"order_id": order_of(environment)}), ("cancel_order", {"order_id": order_of(environment)}))
    )
    environment.step(say("I cannot, it is shipped."))
    assert environment.score().reward == 0.0


def test_repeating_a_tool_answer_word_for_word_tells_nothing() -> None:
    environment = refusing()
    environment.reset(0)
    answer = environment.step(calls(("get_order", {"order_id": order_of(environment)})))[0]["content"]
    environment.step(say("I cannot: " + answer))
    assert environment.score().reward == 0.2


def test_errors_have_the_targets_form_and_every_call_is_answered() -> None:
    env = environment(template())
    env.reset(5)
    answers = env.step(
        calls(
            ("no_such", "{}"),
            ("get_order", "{oops"),
            ("get_order", "[]"),
            ("get_order", {"order": "W1"}),
            ("get_order", {"order_id": 7}),
            ("get_order", {"order_id": "W0000"}),
            ("cancel_order", {"order_id": "W0000"}),
            ("get_order", {"order_id": "C12"}),
        )
    )
    assert [answer["tool_call_id"] for answer in answers] == [f"x{i}" for i in range(8)]
    assert all("error" in json.loads(answer["content"]) for answer in answers)
    assert json.loads(answers[5]["content"]) == {"error": "W0000 not found"}
    assert env.score().parts["writes"] == 0.0


def test_a_wrong_write_runs_like_in_the_target() -> None:
    env = environment(template())
    env.reset(5)
    answer = env.step(calls(("book_visit", {"order_id": order_of(env), "date": "2026-03-11"})))[0]
    assert json.loads(answer["content"]) == {"ok": True}
    assert env.score().reward == 0.0


def withholding() -> TemplateEnvironment:
    steps = [
        {"calls": [], "say": "Which order is it?", "reply": "It is order W1234."},
        {"calls": [recorded_call("cancel_order", {"ok": True}, "write", order_id="W1234")]},
        {"calls": [], "say": "Order W1234 is cancelled. Anything else?"},
    ]
    return environment(template(steps=steps, told=[], opening=["I am C12. Please cancel my order."]))


def test_the_user_answers_the_question_that_was_asked_and_no_farewell() -> None:
    environment = withholding()
    environment.reset(2)
    (reply,) = environment.step(say("Which order is it, please?"))
    assert reply["role"] == "user"
    assert reply["content"].startswith("It is order W")
    assert not environment.done
    environment.reset(2)
    assert environment.step(say("It is cancelled. Anything else?")) == []
    assert environment.done


def test_small_talk_is_answered_as_elsewhere_and_twice_at_most() -> None:
    env = environment(template())
    env.reset(2)
    assert env.step(say("Shall I go ahead?"))[0]["content"] == "Yes, please."
    assert env.step(say("Which order is it?"))[0]["content"] == f"It is order {order_of(env)}."
    assert env.step(say("Shall I go ahead?")) == []
    assert env.done


def test_a_failed_call_stays_failed_and_a_passing_fault_passes() -> None:
    failing = recorded_call("cancel_order", {"error": "busy"}, "error", order_id="W1234")
    steps = [{"calls": [failing]}, *template()["steps"]]
    env = environment(template(steps=steps))
    env.reset(0)
    arguments = {"order_id": order_of(env)}
    assert "error" in env.step(calls(("cancel_order", arguments)))[0]["content"]
    assert env.score().reward == 0.2
    assert env.step(calls(("cancel_order", arguments)))[0]["content"] == '{"ok":true}'
    env.step(say("The fee is 37."))
    assert env.score().success


def test_a_record_changes_only_after_the_write_that_changed_it() -> None:
    steps = [
        {"calls": [recorded_call("get_order", order("W1234", "open"), "read", order_id="W1234")]},
        {"calls": [recorded_call("cancel_order", {"ok": True}, "write", order_id="W1234")]},
        {"calls": [recorded_call("get_order", order("W1234", "cancelled"), "read", order_id="W1234")]},
        {"calls": [], "say": "It is cancelled."},
    ]
    env = environment(template(steps=steps, told=["cancelled"]))
    env.reset(0)
    arguments = {"order_id": order_of(env)}
    repeat = [
        json.loads(a["content"])["status"] for a in env.step(calls(("get_order", arguments), ("get_order", arguments)))
    ]
    assert repeat == ["open", "open"]
    env.step(calls(("cancel_order", arguments)))
    assert json.loads(env.step(calls(("get_order", arguments)))[0]["content"])["status"] == "cancelled"


def test_an_endless_agent_is_stopped() -> None:
    env = environment(template())
    env.reset(0)
    for _ in range(14):
        assert not env.done
        env.step(calls(("get_order", {"order_id": "W0"})))
    assert env.done


@pytest.mark.parametrize(
    ("text", "value", "result"),
    [
        ("it costs $1,250.", "1250", True),
        ("refund 35.00 due", "35", True),
        ("refund 35.50 due", "35", False),
        ("order W12345", "W1234", False),
        ("It is Shipped", "shipped", True),
        ("on 2026-03-11.", "2026-03-11", True),
        ("in 15 days", "5 days", False),
    ],
)
def test_mentions(text: str, value: str, result: bool) -> None:
    assert mentions(text, value) is result


SCALAR = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
JSON = st.recursive(SCALAR, lambda c: st.lists(c) | st.dictionaries(st.text(max_size=5), c), max_leaves=10)
SMALL = settings(max_examples=40)


@SMALL
@given(JSON)
def test_canonical_form_is_a_fixed_point(value: Any) -> None:
    assert canonical(canonical(value)) == canonical(value)


@SMALL
@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=5), st.randoms())
def test_lists_of_records_compare_as_sets(records: list[dict[str, int]], rng: Any) -> None:
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert canonical(shuffled) == canonical(records)
    assert canonical(35.0) == canonical(35)


@given(st.sets(st.text()), st.sets(st.text()))
def test_likeness_is_symmetric_and_bounded(first: set[str], other: set[str]) -> None:
    assert likeness(first, other) == likeness(other, first)
    assert 0.0 <= likeness(first, other) <= 1.0


def test_the_last_question_counts() -> None:
    assert question_words("Done with W12. Which order? Anything else?") == {"anything", "else"}
    assert question_words("No question about W12") == {"no", "question", "about", "#"}
