"""An environment that replays conversations: who does what was done there solves it; a task has seeds of its own."""

import dataclasses

from agents.synthesizer.replay import Replay, replay_environment
from store.types import Outcome
from tests.unit.agents.synthesis.conversations import (
    call,
    conversation,
    demonstrations,
    environment_class,
    play,
    say,
    user,
)
from tests.unit.agents.synthesis.test_world_scenarios import bookings, of_world, reduced, shop

FIRST = 1_000_000


def desk_replay(count: int, seeds: int = 3) -> Replay:
    rows = [dataclasses.replace(row, split="held-out") for row in demonstrations()[0][:count]]
    replay = replay_environment(rows, demonstrations()[0][count : count + 60], first_seed=FIRST, seeds=seeds)
    assert replay is not None
    return replay


def test_every_seed_of_a_task_plays_its_conversation_and_is_solved_by_it() -> None:
    replay = desk_replay(40)
    successes = {row.task_id: row for row in demonstrations()[0][:40] if row.outcome is Outcome.SUCCESS}
    assert len(replay.seeds) > len(successes) / 2
    assert replay.seeds.keys() <= successes.keys()
    environment = environment_class(replay.source_code)()
    for task, seeds in replay.seeds.items():
        assert len(set(seeds)) == 3
        assert min(seeds) >= FIRST
        tools = [
            item["function"]["name"] for message in successes[task].messages for item in message.get("tool_calls") or ()
        ]
        for seed in seeds:
            assert play(environment, seed).success
            environment.reset(seed)
            calls = [item for message in environment.oracle() for item in message.get("tool_calls") or ()]
            assert [item["function"]["name"] for item in calls] == tools
    assert replay == desk_replay(40)


def test_trials_of_a_task_share_its_seeds() -> None:
    def cancelled(name: str, task: str, order: str) -> object:
        row = conversation(
            name,
            user(f"Please cancel {order}."),
            call("get_order", {"order_id": order, "status": "open"}, order_id=order),
            call("cancel_order", {"ok": True}, order_id=order),
            say(f"Order {order} is cancelled."),
        )
        return dataclasses.replace(row, task_id=task)

    rows = [cancelled("a", "1", "W1"), cancelled("b", "1", "W1"), cancelled("c", "2", "W2")]
    replay = replay_environment(rows, [], first_seed=0, seeds=4)  # type: ignore[arg-type]
    assert replay is not None
    assert {task: len(seeds) for task, seeds in replay.seeds.items()} == {"1": 4, "2": 4}
    assert not {*replay.seeds["1"]} & {*replay.seeds["2"]}


def test_a_conversation_that_needs_an_omitted_tools_answer_to_prose_is_not_replayed() -> None:
    rows = [dataclasses.replace(row, task_id=row.id) for row in [*shop(), *bookings("on the {}th of April")]]
    world = reduced(of_world(rows), "book_visit", "cancel_order")
    replay = replay_environment(rows, [], first_seed=0, seeds=1, target_world=world)
    assert replay is not None
    assert replay.seeds.keys() == {row.id for row in shop() if row.outcome is Outcome.SUCCESS}


def test_without_a_success_there_is_none() -> None:
    failures = [row for row in demonstrations()[0][:60] if row.outcome is Outcome.FAILURE]
    assert failures
    assert replay_environment(failures, demonstrations()[0], first_seed=0, seeds=1) is None


def test_conversations_with_arguments_that_the_tools_do_not_have_are_replayed() -> None:
    def with_other_arguments(message: dict[str, object]) -> dict[str, object]:
        calls: object = message.get("tool_calls") or ()
        assert isinstance(calls, list | tuple)
        renamed_calls = [{**item, "function": {**item["function"], "arguments": '{"id": "x"}'}} for item in calls]
        return {**message, **({"tool_calls": renamed_calls} if renamed_calls else {})}

    rows = [
        dataclasses.replace(row, messages=[with_other_arguments(message) for message in row.messages])
        for row in demonstrations()[0][:30]
    ]
    replay = replay_environment(rows, demonstrations()[0][30:90], first_seed=0, seeds=1)
    assert replay is not None
    environment = environment_class(replay.source_code)()
    assert all(play(environment, seed).success for seeds in replay.seeds.values() for seed in seeds)


def test_a_tool_without_parameters_may_have_none() -> None:
    ping = {"type": "function", "function": {"name": "ping", "description": "", "parameters": None}}
    row = conversation(
        "a",
        user("Please cancel W1."),
        call("ping", {"ok": True}),
        call("get_order", {"order_id": "W1", "status": "open"}, order_id="W1"),
        call("cancel_order", {"ok": True}, order_id="W1"),
        say("Order W1 is cancelled."),
    )
    row = dataclasses.replace(row, task_id="1", tools=[*row.tools, ping])
    assert replay_environment([row], [], first_seed=0, seeds=1) is not None
