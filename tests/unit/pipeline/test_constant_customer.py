"""One constant customer counts as none, until a cycle has used conversations."""

from dataclasses import replace
from pathlib import Path

import pytest

from store.records import Cycle, CycleState
from store.repositories.cycles import list_stage_events, save_cycle
from store.repositories.trajectories import TrajectoryFilter, list_trajectories, save_trajectories
from store.types import Outcome, Trajectory
from tests.unit.targets.conversations import NOW, conversation, new_cycle
from traced.core.errors import StageError
from traced.pipeline import constant_customer, world
from traced.pipeline.collect import check_conversations, collect
from traced.pipeline.constant_customer import find_constant_customer, split_without_constant_customer
from traced.pipeline.context import Context
from traced.pipeline.incumbent import Incumbent
from traced.targets.conversation_target import HELD_OUT, TRAIN, conversation_target

OUTCOMES = (Outcome.SUCCESS, Outcome.FAILURE)


def save(context: Context, numbers: range, split: str = TRAIN, customer: str = "customer-1") -> None:
    rows = [conversation(n, OUTCOMES[n % 2], customer=customer, split=split) for n in numbers]
    with context.write_session() as session:
        save_trajectories(session, rows)


def recordings(context: Context) -> list[Trajectory]:
    with context.read_session() as session:
        return list_trajectories(session, TrajectoryFilter(source="acme"))


def without_customer(context: Context) -> dict[str, str]:
    target = conversation_target(context.settings)
    return {row.id: target.split(row.task_id) for row in recordings(context)}


@pytest.mark.parametrize("split", [TRAIN, HELD_OUT])
async def test_a_cycle_can_begin_whatever_the_split_of_the_constant_customer(tmp_path: Path, split: str) -> None:
    with new_cycle(tmp_path) as context:
        save(context, range(40), split)
        collected = await collect(context)
        assert {row.id: row.split for row in recordings(context)} == without_customer(context)
        assert {row.split for row in collected} == {TRAIN}
        assert 0 < len(collected) < 40
        with context.read_session() as session:
            detail = list_stage_events(session, context.cycle_id)[-1].detail
        assert detail["constant customer"].startswith("one customer has 40 of 40 conversations, so it counts as none")
        assert "X-Traced-Customer" in context.progress.lines["collect"].figure
        # The same conversations once more change nothing.
        rows = recordings(context)
        save(context, range(40), split)
        assert recordings(context) == rows


async def test_after_a_collection_no_split_changes(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        save(context, range(10), customer="")
        assert len(await collect(context)) == 10
        save(context, range(10, 200))
        with context.write_session() as session:
            # A conversation of before continues under another id.
            save_trajectories(session, [conversation(0, OUTCOMES[0], id="longer-0", customer="customer-1", trial=1)])
            save_cycle(session, Cycle("c3", "acme", "tiny", 0, {}, CycleState.RUNNING, NOW))
        constant = split_without_constant_customer(context.store, conversation_target(context.settings))
        assert constant is not None
        assert "later conversations keep the customer's split; to keep" in constant.text
        await collect(replace(context, cycle_id="c3"))
        assert {row.split for row in recordings(context)} == {TRAIN}


def test_the_store_is_locked_only_if_a_split_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with new_cycle(tmp_path) as context:
        save(context, range(40))
        target = conversation_target(context.settings)
        constant = split_without_constant_customer(context.store, target)
        assert {row.id: row.split for row in recordings(context)} == without_customer(context)
        monkeypatch.setattr(constant_customer, "write_session", None)
        assert split_without_constant_customer(context.store, target) == constant


@pytest.mark.parametrize(
    ("constant", "named_count", "nameless", "is_constant"),
    [(90, 10, 0, True), (89, 11, 0, False), (8, 0, 0, True), (7, 0, 0, False), (9, 0, 1, True), (0, 0, 40, False)],
)
def test_the_rule(tmp_path: Path, constant: int, named_count: int, nameless: int, is_constant: bool) -> None:
    with new_cycle(tmp_path) as context:
        save(context, range(constant))
        for number in range(named_count):
            save(context, range(1000 + number, 1001 + number), customer=f"customer-x{number}")
        save(context, range(2000, 2000 + nameless), customer="")
        with context.read_session() as session:
            customer = find_constant_customer(session, "acme")
        assert (customer is not None) == is_constant


def test_a_cycle_that_waits_says_what_to_do(tmp_path: Path) -> None:
    with new_cycle(tmp_path) as context:
        save(context, range(0, 40, 2))  # successes alone
        with context.read_session() as session, pytest.raises(StageError, match="one customer has 20 of 20") as error:
            check_conversations(session, "acme", Incumbent())
        assert "the field user" in error.value.message


def test_the_stages_have_these_names() -> None:
    assert {*constant_customer.USING_STAGES} == {"collect", world.WORLD}
