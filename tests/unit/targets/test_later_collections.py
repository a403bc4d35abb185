"""What a later cycle collects of a target of conversations: those that its live system answered since its promotion."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from store.records import Exchange
from store.repositories.cycles import list_stage_events
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import judged_in_split, save_trajectories
from store.tables import CycleRow
from store.types import EndCause, Outcome
from tests.unit.targets.conversations import NOW, conversation, judged_conversations, new_cycle
from traced.core.errors import StageError
from traced.ingest.file_import import ImportRequest, import_file
from traced.pipeline import collect as collect_module
from traced.pipeline import incumbent, predecessor
from traced.pipeline.collect import OUTCOME_COUNTS, collect, collected, not_analyzed, of_tool_set
from traced.pipeline.context import Context
from traced.pipeline.cycles import find_cycle
from traced.pipeline.incumbent import Incumbent
from traced.pipeline.step import live_step
from traced.routing.composition import Composition
from traced.targets.conversation_target import (
    HELD_OUT,
    TRAIN,
)

OLD = "date-reasoning@v1"


async def test_a_later_cycle_collects_what_its_live_system_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    later = NOW + timedelta(hours=1)
    groups: dict[str, tuple[range, dict[str, Any]]] = {
        "live": (range(10, 18), {"model": "dates@v1", "started_at": later}),
        "base": (range(20, 24), {"model": "base", "started_at": later}),
        "before": (range(30, 38), {"model": "base", "started_at": NOW - timedelta(hours=1)}),
        "other": (range(40, 48), {"model": "dates@v2", "started_at": later}),
    }
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
    with new_cycle(tmp_path) as context:
        with context.write_session() as session:
            for numbers, changes in groups.values():
                save_trajectories(session, [conversation(n, outcomes[n % 2], **changes) for n in numbers])
        rows = await collect(context)
        assert {row.id for row in rows} == {f"acme-{n}" for n in (*range(10, 18), *range(20, 24))}
        assert collected(context) == rows
        assert {row.model for row in of_tool_set(context, rows)} == {"dates@v1", "base"}


async def test_a_later_cycle_says_what_does_not_name_the_model_that_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    with new_cycle(tmp_path, **{"target.held_out": 0.01}) as context:
        for agent in ("dates@v1", "base", "recorded", "dates@v2"):
            path = tmp_path / f"{agent}.jsonl"
            records = [
                {"id": f"{agent}-{number}", "reward": number % 2, "started_at": NOW.isoformat(), "messages": hello}
                for number in range(8)
            ]
            path.write_text("\n".join(map(json.dumps, records)))
            import_file(context.store, context.settings, ImportRequest(path, agent=agent), at=NOW)
        models = Counter(row.model for row in await collect(context))
        assert models.keys() == {"dates@v1", "base", "recorded"}
        figure = context.progress.lines["collect"].figure
        assert f"; {models['recorded']} do not name the model that answered (recorded), and count as answered" in figure
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: Incumbent())
    with new_cycle(tmp_path / "first") as context:
        with context.write_session() as session:
            save_trajectories(session, judged_conversations(4, 4))
        await collect(context)
        assert "name the model" not in context.progress.lines["collect"].figure


async def test_a_conversation_that_a_version_answered_in_part_is_that_of_no_system_without_it(tmp_path: Path) -> None:
    """A rollback moves the conversations of its version to what answers instead, in the middle of them."""
    parts = {0: ["politeness@v1", "base"], 1: ["base", "base"], 2: ["gpt-4o"]}
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
    with new_cycle(tmp_path) as context:
        rows = [conversation(number, outcomes[number % 2], model="base") for number in range(20)]
        exchanges = [
            Exchange(f"{row.id}-{place}", row.id, NOW, model, 200, 0.1, trajectory_id=row.id)
            for row in rows
            for place, model in enumerate(parts[int(row.task_id) % 3])
        ]
        with context.write_session() as session:
            save_trajectories(session, rows)
            save_exchanges(session, exchanges)
        assert {int(row.task_id) % 3 for row in await collect(context)} == {1, 2}
        assert {int(row.task_id) % 3 for row in of_tool_set(context, rows)} == {0, 1, 2}
        with context.read_session() as session:
            in_split = judged_in_split(session, "acme", TRAIN, adapters=["politeness@v1"])
        assert len(in_split) == 20


async def test_a_later_cycle_waits_for_conversations_after_the_promotion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    outcomes = (Outcome.SUCCESS, Outcome.FAILURE)
    old_changes = {"model": "base", "started_at": NOW - timedelta(hours=1)}
    with new_cycle(tmp_path) as context:
        with context.write_session() as session:
            save_trajectories(session, [conversation(n, outcomes[n % 2], **old_changes) for n in range(20)])
        with pytest.raises(StageError, match="since 2026-01-01 00:00 UTC, the newest promotion") as refusal:
            await collect(context)
        assert "no start time" not in refusal.value.message
        with context.write_session() as session:
            save_trajectories(session, [conversation(n, outcomes[n % 2], started_at=None) for n in range(20, 23)])
        with pytest.raises(StageError, match=r"left out because they have no start time: 3\. If they are newer"):
            await collect(context)
        new_changes = {"model": "dates@v1", "started_at": NOW}
        with context.write_session() as session:
            save_trajectories(session, [conversation(n, outcomes[n % 2], **new_changes) for n in range(30, 40)])
        assert len(await collect(context)) == 10
        figure = context.progress.lines["collect"].figure
        assert figure.startswith("5 successes and 5 failures; 0 without an outcome, 0 held out; left out because they")


async def test_only_what_the_cycle_could_use_counts_as_without_an_outcome_or_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outcome for a conversation of before the promotion, or for the answer of a shadow, would change nothing."""
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    unused: list[dict[str, Any]] = [
        {"model": "base", "started_at": NOW - timedelta(hours=1)},
        {"model": "dates@v2", "started_at": NOW},
        {"model": "dates@v1", "started_at": NOW, "end_cause": EndCause.SHADOW},
    ]
    rows = [conversation(1, Outcome.UNKNOWN, started_at=NOW, model="dates@v1")]
    rows += [conversation(2, Outcome.SUCCESS, started_at=NOW, model="base", split=HELD_OUT)]
    for number, changes in enumerate(unused):
        rows += [conversation(10 + number, Outcome.UNKNOWN, **changes)]
        rows += [conversation(20 + number, Outcome.FAILURE, split=HELD_OUT, **changes)]
    with new_cycle(tmp_path) as context:
        with context.write_session() as session:
            save_trajectories(session, rows)
        with pytest.raises(StageError, match=r"of each \(1 without an outcome, 1 held out\)"):
            await collect(context)


async def test_the_outcomes_of_all_that_the_live_system_answered_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), NOW)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    outcomes = [Outcome.SUCCESS] * 30 + [Outcome.FAILURE] * 10 + [Outcome.UNKNOWN] * 5
    rows = [conversation(i, outcome, started_at=NOW, model="dates@v1") for i, outcome in enumerate(outcomes)]
    earlier = NOW - timedelta(hours=1)
    rows += [conversation(100 + i, Outcome.SUCCESS, started_at=earlier, model="base") for i in range(7)]
    with new_cycle(tmp_path, **{"collect.episodes": 16}) as context:
        with context.write_session() as session:
            save_trajectories(session, rows)
        assert len(await collect(context)) == 16
        with context.read_session() as session:
            details = [event.detail for event in list_stage_events(session, context.cycle_id) if event.detail]
    counts = [detail[OUTCOME_COUNTS] for detail in details if OUTCOME_COUNTS in detail]
    assert counts == [{"success": 30, "failure": 10}]


@pytest.fixture
def successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    """The context of a cycle of another base model, beside a version of the first one that is live since ``NOW``."""
    live = Incumbent(Composition((OLD,)), (OLD,), NOW)
    monkeypatch.setattr(predecessor, "current_incumbent", lambda *_: live)

    async def nothing(_: Context) -> None:
        pass

    monkeypatch.setattr(collect_module, "play_predecessor", nothing)
    with new_cycle(tmp_path, **{"model.spec": "bundled-large", "model.predecessor": "bundled"}) as context:
        outcomes = [Outcome.SUCCESS] * 12 + [Outcome.FAILURE] * 6
        later, earlier = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
        rows = [conversation(i, outcome, started_at=later, model=OLD) for i, outcome in enumerate(outcomes)]
        rows += [conversation(50 + i, Outcome.FAILURE, started_at=earlier, model="base") for i in range(3)]
        rows += [conversation(80 + i, Outcome.FAILURE, started_at=later, model="seats@v3") for i in range(3)]
        with context.write_session() as session:
            session.execute(update(CycleRow).values(target=context.target.name))  # also that of the version
            save_trajectories(session, rows)
        yield context


async def test_a_cycle_of_a_new_base_model_collects_what_its_predecessor_answered(successor: Context) -> None:
    rows = await collect(successor)
    assert Counter(row.model for row in rows) == {OLD: 18, "base": 3}
    assert Counter(row.model for row in of_tool_set(successor, rows)) == {OLD: 18, "base": 3}
    assert not_analyzed(successor) == 21
    with successor.read_session() as session:
        events = list_stage_events(session, successor.cycle_id)
        initial = live_step(session, successor.cycle_id, {}, events).initial_success
    # Its success is that since its promotion.
    assert initial is not None
    assert (initial.episodes, initial.successes) == (18, 12)


async def test_a_predecessor_without_a_conversation_since_its_promotion_has_no_success(
    successor: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition((OLD,)), (OLD,), NOW + timedelta(hours=2))
    monkeypatch.setattr(predecessor, "current_incumbent", lambda *_: live)
    await collect(successor)
    with successor.read_session() as session:
        events = list_stage_events(session, successor.cycle_id)
        assert live_step(session, successor.cycle_id, {}, events).initial_success is None


def test_a_new_base_model_needs_enough_conversations_of_its_predecessor(successor: Context) -> None:
    with successor.write_session() as session:
        assert find_cycle(session, successor.settings, "bundled-large", at=NOW).model == "bundled-large"
