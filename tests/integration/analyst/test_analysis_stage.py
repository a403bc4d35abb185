"""The analyze station with a language model: what is stored of it, once, beside production, and what the gate asks."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agents.errors import ModelDenied
from agents.transcript import transcript
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Cycle, CycleState, Finding, StageState
from store.repositories.capabilities import list_capabilities, list_labels, save_capabilities
from store.repositories.cycles import list_stage_events, save_cycle
from store.repositories.llm_replies import list_citations, list_faults, list_replies, stage_costs
from store.repositories.trajectories import save_trajectories, update_outcome
from store.types import Capability, EndCause, Outcome, Trajectory, Verdict
from tests.scripted_analyst import ANSWERING, LOOKING, Asked, Thinking
from tests.scripted_model import Scripted, Sent, Status, served
from tests.unit.agents.synthesis.conversations import FAULTS
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import gate
from traced.pipeline.analyze import analysis_context, analyze, stored_findings, to_analyze
from traced.pipeline.collect import JUDGED_ANEW
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE, Player
from traced.pipeline.findings import compare
from traced.processes.job import FaultAttribution, JobOutcome, attribute_fault, describe
from traced.targets.desk import demonstrate
from traced.targets.registry import target

CYCLE, EPISODES, RUNS = "desk-1", 24, 2
CANARIES = ("canary-part", "canary-detail", "canary-id")
NOTHING = Progress(Console(file=StringIO()))


def episode(number: int, cycle: str = CYCLE) -> Trajectory:
    """A desk's episode with something that nobody may see in whatever is private."""
    told = demonstrate(number, FAULTS, 1)
    hidden = {"parts": {"canary-part": 1.0}, "detail": "canary-detail", "id": f"canary-id-{cycle}-{number:03}"}
    return replace(told, model="base", cycle_id=cycle, **hidden)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """A cycle that has collected."""
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as opened:
        save_cycle(opened, Cycle(CYCLE, "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(opened, [episode(number) for number in range(EPISODES)])
    yield Context(load_settings(tmp_path), store, target("desk"), ModelFiles("tiny", tmp_path), CYCLE, NOTHING, Meter())
    store.dispose()


def by(server: Scripted, context: Context, **changes: Any) -> Context:
    """The same, analysed by a server's model."""
    llm = {"llm.base_url": server.url, "llm.model": "scripted", "analysis.analyst": "llm", "analysis.runs": RUNS}
    return replace(context, settings=load_settings(context.data_dir, llm | changes))


def found(context: Context) -> dict[str, Any]:
    with read_session(context.store) as opened:
        events = list_stage_events(opened, context.cycle_id)
    return [event.detail for event in events if event.state is StageState.FINISHED][-1]


def by_name(context: Context) -> dict[str, Finding]:
    return {one.capability: one for one in stored_findings(context)}


def test_it_is_stored_whole_and_once_and_says_what_it_rests_on(context: Context) -> None:
    thinking = Thinking()
    with served(thinking, canaries=CANARIES) as server:
        kept = asyncio.run(analyze(by(server, context)))
        asked, told = len(server.asked), found(context)
        assert asyncio.run(analyze(by(server, context))) == kept
        assert len(server.asked) == asked
    findings = by_name(context)
    assert set(findings) == {LOOKING["name"], ANSWERING["name"]}
    one = findings[LOOKING["name"]]
    assert (one.runs, one.agreement) == (RUNS, 1.0)
    assert None not in (one.delta, one.delta_low, one.delta_high, one.coverage_low, one.coverage_high)
    with read_session(context.store) as opened:
        labels, faults = list_labels(opened, CYCLE), list_faults(opened, CYCLE)
        cited, replies = list_citations(opened, CYCLE), list_replies(opened, CYCLE, stage="analyze")
    assert len(labels) == EPISODES * 2 * RUNS
    assert {(label.verdict is Verdict.NA) == (label.message_index is None) for label in labels} == {True}
    assert [one.position for one in cited if one.capability == LOOKING["name"]] == [0, 1, 2]
    assert len(faults) == sum(episode(number).outcome is Outcome.FAILURE for number in range(EPISODES))
    assert len(replies) == asked
    assert (told["analyst"], told["mined"], told["faults"]) == ("llm", EPISODES, {"agent": len(faults)})


def test_a_model_that_goes_away_costs_what_was_in_flight_and_no_more(context: Context) -> None:
    """Half of the answers, then nobody is let in; the same command pays for the rest only."""
    thinking, limit = Thinking(), 30

    def closing(body: dict[str, Any], nth: int) -> Sent:
        return thinking(body, nth) if nth < limit else Status(401, message="no such key")

    with served(closing, canaries=CANARIES) as server, pytest.raises(ModelDenied, match="the llm analyst") as told:
        asyncio.run(analyze(by(server, context)))
    assert (
        attribute_fault(JobOutcome.FAILED, describe(told.value), None) is FaultAttribution.INFRASTRUCTURE
    )  # a service waits for the key
    assert stored_findings(context) == []
    second = Thinking()
    with served(second, canaries=CANARIES) as server:
        asyncio.run(analyze(by(server, context)))
    with read_session(context.store) as opened:
        paid = len(list_replies(opened, CYCLE))
    assert paid == limit + sum(second.kinds.values())
    failures = sum(episode(number).outcome is Outcome.FAILURE for number in range(EPISODES))
    assert paid == failures + 3 + EPISODES * RUNS  # as many as an analysis takes that nothing disturbs


def test_production_is_analysed_beside_and_what_was_judged_anew_meanwhile_is_left_out(context: Context) -> None:
    reported = [
        replace(episode(900 + n), id=f"canary-id-router-{n}", split="", cycle_id=None, end_cause=EndCause.SILENCE)
        for n in range(10)
    ]
    changed = reported[3]
    other = Outcome.FAILURE if changed.outcome is Outcome.SUCCESS else Outcome.SUCCESS
    with write_session(context.store) as opened:
        save_trajectories(opened, reported)

    def meanwhile(asked: Asked) -> Sent | None:
        if asked.kind == "merge":
            with write_session(context.store) as opened:
                assert update_outcome(opened, replace(changed, outcome=other))
        return None

    with served(Thinking(meanwhile), canaries=CANARIES) as server:
        asyncio.run(analyze(by(server, context)))
    assert (found(context)["production"], found(context)["left_out"]) == (9, {JUDGED_ANEW: 1})
    with read_session(context.store) as opened:
        ids = {label.trajectory_id for label in list_labels(opened, CYCLE)}
        ids |= {one.trajectory_id for one in [*list_faults(opened, CYCLE), *list_citations(opened, CYCLE)]}
    assert changed.id not in ids
    assert reported[4].id in ids


def test_what_an_earlier_cycle_named_keeps_its_name_and_texts(context: Context) -> None:
    first = Capability("looks-before-changes", "Old title", "Old.", "old", "old", "old")
    elsewhere = replace(first, name="plain-answer", title="Another target's")
    with write_session(context.store) as opened:
        for cycle, source, known in (("desk-0", "desk", first), ("other-0", "shop", elsewhere)):
            save_cycle(opened, Cycle(cycle, source, "bundled", 0, {}, CycleState.FINISHED, T0))
            save_capabilities(opened, cycle, [known])
    with served(Thinking(), canaries=CANARIES) as server:
        asyncio.run(analyze(by(server, context)))
        asked, at = len(server.asked), by(server, context)
        again = asyncio.run(compare(analysis_context(at), to_analyze(at), ["llm"], lambda *_: None))
        assert len(server.asked) == asked
    with read_session(context.store) as opened:
        kept = {one.name: one for one in list_capabilities(opened, CYCLE)}
    assert set(kept) == {"looks-before-changes", "plain-answers"}
    assert kept["looks-before-changes"] == first
    assert {one.capability for one in again.sides[0].findings} == set(kept)  # found once more, it is known still


def test_a_gate_asks_a_model_what_a_capability_without_a_detector_does_not_touch(context: Context) -> None:
    thinking = Thinking()
    base = [episode(number) for number in range(10, 20)]  # three of them change nothing
    with write_session(context.store) as opened:
        save_capabilities(opened, CYCLE, [Capability(**LOOKING)])

    def untouched(at: Context) -> set[str]:
        shown = RunningStage(NOTHING, "gate")
        NOTHING.start(shown.key, "Gate")
        sides = gate.Sides(LOOKING["name"], "", Player(BASE), Player("x@v1"))
        rounds = gate._Rounds(at, sides, at.target, at.target, shown)  # type: ignore[arg-type]
        return asyncio.run(rounds._untouched(base))

    with served(thinking, canaries=CANARIES) as server:
        tasks = untouched(by(server, context))
        assert untouched(by(server, context)) == tasks
    assert thinking.kinds == {"label": len(base)}
    made = {one.task_id: {call.name for call in transcript(one).calls} for one in base}
    assert tasks == {task for task, calls in made.items() if not calls & CHANGES}
    assert len(tasks) == 3
    with read_session(context.store) as opened:
        (cost,) = stage_costs(opened, CYCLE)
    assert (cost.stage, cost.capability, cost.calls) == ("gate", LOOKING["name"], len(base))


CHANGES = {"return_item", "exchange_item", "cancel_order", "schedule_pickup", "change_payment"}
