"""Scenarios on top of a target's world: what they did not record, the world answers under the scenario's names."""

import json
from typing import Any

import pytest

from agents.synthesizer.builtin import WorldData, synthesize
from agents.transcript import transcripts
from agents.world.reconstruction import without_tools, world_data, world_source
from agents.world.runtime import NOT_RECORDED
from sandbox.admission.static_analysis import inspect_source
from sandbox.admission.world import omitted_tools, world_of
from sandbox.hashing import environment_hash
from store.types import Label, Outcome, Trajectory, Verdict
from tests.unit.agents.synthesis.conversations import (
    call,
    capability,
    conversation,
    environment_class,
    order,
    play,
    say,
    user,
)

COUNT = 12


def shop() -> list[Trajectory]:
    """Return conversations that cancel an order each, and one in which another order was read."""
    rows = []
    for number in range(COUNT):
        name = f"W{4000 + number}"
        parts = [
            user(f"Please cancel order {name}."),
            call("get_order", order(name, fee=30 + number), order_id=name),
            call("cancel_order", {"ok": True}, order_id=name),
            say(f"Order {name} is cancelled, the fee is {30 + number}."),
        ]
        rows.append(conversation(f"t{number:02d}", *parts))
    other = call("get_order", order("W9876", fee=77), order_id="W9876")
    return [*rows, conversation("u", user("Which fee has W9876?"), other, say("77."), outcome=Outcome.FAILURE)]


def of_world(rows: list[Trajectory]) -> WorldData:
    data = world_data(transcripts(rows), [row.id for row in rows])
    return WorldData(environment_hash(world_source(data)), data)


def reduced(world: WorldData, *tools: str) -> WorldData:
    return WorldData(world.digest, without_tools(world.data, tools))


def bookings(day: str = "2026-04-{}") -> list[Trajectory]:
    """Return conversations that book a visit for an order each."""
    rows = []
    for number in range(COUNT):
        name, date = f"W{6000 + number}", day.format(number + 10)
        parts = [
            user(f"Please book a visit for order {name} {date}."),
            call("get_order", order(name), order_id=name),
            call("book_visit", {"ok": True}, order_id=name, date=date),
            say(f"The visit for {name} is booked."),
        ]
        rows.append(conversation(f"v{number:02d}", *parts))
    return rows


def tools_of_templates(file: str) -> set[str]:
    return {
        step_call["tool"]
        for template in environment_class(file)().data["templates"]
        for step in template["steps"]
        for step_call in step["calls"]
    }


def written_without(rows: list[Trajectory], *omitted: str) -> str:
    """Return the environment of conversations on their world without some tools."""
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows if row.id != "u"]
    world = reduced(of_world(rows), *omitted)
    return synthesize(capability("multi-step-completion"), rows, labels, seed=0, target_world=world)


def renewals() -> list[Trajectory]:
    """Return conversations that cancel an order each and then book a visit."""
    rows = []
    for number in range(COUNT):
        name = f"W{5000 + number}"
        parts = [
            user(f"Please cancel order {name} and book a visit on 2026-04-{number + 10}."),
            call("get_order", order(name, fee=30 + number), order_id=name),
            call("cancel_order", {"ok": True}, order_id=name),
            call("book_visit", {"visit": f"V{200 + number}"}, order_id=name, date=f"2026-04-{number + 10}"),
            say(f"Order {name} is cancelled, the visit is booked."),
        ]
        rows.append(conversation(f"t{number:02d}", *parts))
    return rows


def test_an_omitted_tool_answers_the_recorded_call_after_the_recorded_writes_only() -> None:
    file = written_without(renewals(), "book_visit")
    assert omitted_tools(file) == {"book_visit"}
    assert tools_of_templates(file) == {"get_order", "cancel_order", "book_visit"}
    environment = environment_class(file)()
    for seed in range(5):
        assert play(environment, seed).success
        environment.reset(seed)
        _, cancellation, booking = [item for step in environment.scenario.steps for item in step["calls"]]
        assert ask(environment, "book_visit", **booking["args"]) == NOT_RECORDED  # before its time
        environment.reset(seed)
        ask(environment, "cancel_order", **cancellation["args"])
        order_id = booking["args"]["order_id"]
        for change in ({"date": "2027-01-01"}, {"order_id": "W1"}, {"order_id": f"{order_id} "}):
            assert ask(environment, "book_visit", **{**booking["args"], **change}) == NOT_RECORDED
        environment.reset(seed)
        ask(environment, "cancel_order", **cancellation["args"])
        assert ask(environment, "book_visit", **booking["args"]) == booking["result"]
        assert ask(environment, "book_visit", **booking["args"]) == NOT_RECORDED  # a second time


def test_a_write_of_an_omitted_tool_that_is_not_recorded_does_not_serve_the_user() -> None:
    environment = environment_class(written_without(renewals(), "book_visit"))()
    environment.reset(0)
    lookup, cancellation, booking = [item for step in environment.scenario.steps for item in step["calls"]]
    for item in (lookup, booking, cancellation):
        ask(environment, item["tool"], **item["args"])
    environment.step({"role": "assistant", "content": environment.scenario.steps[-1]["say"]})
    assert environment.done
    assert environment.score().reward <= 0.5


def test_a_further_write_of_an_omitted_tool_is_a_wrong_one() -> None:
    environment = environment_class(written_without(renewals(), "book_visit"))()
    for date, succeeds in ((None, True), ("2027-01-01", False)):
        environment.reset(0)
        *calls, farewell = environment.oracle()
        for message in calls:
            environment.step(message)
        if date is not None:
            booking = json.loads(calls[-1]["tool_calls"][0]["function"]["arguments"])
            assert ask(environment, "book_visit", **{**booking, "date": date}) == NOT_RECORDED
        environment.step(farewell)
        assert environment.score().success is succeeds


def test_an_omitted_read_is_not_answered_after_a_write_that_it_never_followed() -> None:
    environment = environment_class(written_without(renewals(), "get_order"))()
    for seed in range(5):
        environment.reset(seed)
        lookup, cancellation, _ = [item for step in environment.scenario.steps for item in step["calls"]]
        assert ask(environment, "get_order", order_id="W1") == NOT_RECORDED
        assert [ask(environment, "get_order", **lookup["args"]) for _ in range(2)] == [lookup["result"]] * 2
        ask(environment, "cancel_order", **cancellation["args"])
        assert ask(environment, "get_order", **lookup["args"]) == NOT_RECORDED


def test_no_scenario_needs_an_omitted_tools_answer_to_prose() -> None:
    rows = [*shop(), *bookings("on the {}th of April")]
    file = written_without(rows, "book_visit")
    assert (world_of(file), omitted_tools(file)) == (of_world(rows).digest, {"book_visit"})
    assert tools_of_templates(file) == {"get_order", "cancel_order"}


def test_a_world_that_carries_too_few_scenarios_is_left_out() -> None:
    file = written_without([*shop()[:5], *bookings("on the {}th of April")], "book_visit")
    assert world_of(file) is None
    assert tools_of_templates(file) == {"get_order", "book_visit", "cancel_order"}


@pytest.fixture(scope="module")
def source() -> str:
    rows = shop()
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows[:COUNT]]
    return synthesize(capability("multi-step-completion"), rows, labels, seed=0, target_world=of_world(rows))


def ask(environment: Any, tool: str, **arguments: str) -> str:
    function = {"name": tool, "arguments": json.dumps(arguments)}
    message = {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    return str(environment.step(message)[0]["content"])


def test_the_file_names_its_world_and_stands_alone(source: str) -> None:
    rows = shop()
    assert world_of(source) == of_world(rows).digest
    passed, evidence = inspect_source(source)
    assert passed, evidence
    environment = environment_class(source)()
    assert all(play(environment, seed).success for seed in range(10))


def test_a_record_outside_of_the_scenario_is_the_worlds_and_an_unknown_one_is_not_invented(source: str) -> None:
    environment = environment_class(source)()
    for seed in range(10):
        environment.reset(seed)
        # Amounts may be renamed, the rest of the record stays.
        record = json.loads(ask(environment, "get_order", order_id="W9876"))
        assert {**record, "fee": 77} == order("W9876", fee=77)
        assert "not found" in ask(environment, "get_order", order_id="W1111")


def test_without_a_world_the_same_record_is_unknown() -> None:
    rows = shop()
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows[:COUNT]]
    file = synthesize(capability("multi-step-completion"), rows, labels, seed=0)
    assert world_of(file) is None
    environment = environment_class(file)()
    environment.reset(0)
    assert "not found" in ask(environment, "get_order", order_id="W9876")


def shop_with_rereads() -> list[Trajectory]:
    """Return the shop's conversations, and failures that read the order again after its cancellation."""
    rows = shop()
    for number in range(3):
        name = f"W{7000 + number}"
        parts = [
            user(f"Please cancel order {name}."),
            call("get_order", order(name, fee=50 + number), order_id=name),
            call("cancel_order", {"ok": True}, order_id=name),
            call("get_order", order(name, "cancelled", fee=50 + number), order_id=name),
            say("Done?"),
        ]
        rows.append(conversation(f"r{number}", *parts, outcome=Outcome.FAILURE))
    return rows


@pytest.mark.parametrize("has_world", [True, False])
def test_a_read_repeated_after_a_write_shows_what_such_writes_change(has_world: bool) -> None:
    rows = shop_with_rereads()
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows[:COUNT]]
    target_world = of_world(rows) if has_world else None
    file = synthesize(capability("multi-step-completion"), rows, labels, seed=0, target_world=target_world)
    environment = environment_class(file)()
    for seed in range(5):
        environment.reset(seed)
        lookup, write = [item for step in environment.scenario.steps for item in step["calls"]]
        record = json.loads(ask(environment, lookup["tool"], **lookup["args"]))
        assert json.loads(ask(environment, lookup["tool"], **lookup["args"])) == record
        ask(environment, write["tool"], **write["args"])
        changed_record = json.loads(ask(environment, lookup["tool"], **lookup["args"]))
        assert changed_record == ({**record, "status": "cancelled"} if has_world else record)


def test_a_call_that_does_not_fit_its_schema_is_answered_as_it_was_recorded() -> None:
    rows, refusal = shop(), {"error": "which order, please?"}
    rows[-1].messages.extend(call("cancel_order", refusal))
    # The target overlooks an argument that its schema does not have.
    rows[0].messages[4:6] = call("cancel_order", {"ok": True}, order_id="W4000", note="soon")
    labels = [Label(row.id, "multi-step-completion", 0, Verdict.PRESENT) for row in rows[:COUNT]]
    file = synthesize(capability("multi-step-completion"), rows, labels, seed=0, target_world=of_world(rows))
    environment = environment_class(file)()
    assert "t00" in {name for template in environment.data["templates"] for name in template["from"]}
    for seed in range(5):
        environment.reset(seed)
        order_id = environment.scenario.steps[0]["calls"][0]["args"]["order_id"]
        assert json.loads(ask(environment, "cancel_order")) == refusal
        refusal_text = ask(environment, "cancel_order", order_id=order_id, why="late")
        assert json.loads(refusal_text) == {"error": "cancel_order needs order_id"}
