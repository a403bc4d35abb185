"""The analyze station with a language model: what is stored of it, once, beside production, and what the gate asks."""

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agents.errors import ModelDenied
from agents.llm.endpoint import Endpoint
from agents.transcript import transcript
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Cycle, CycleState, Finding, StageState
from store.repositories.capabilities import list_capabilities, list_labels, save_capabilities, save_labels
from store.repositories.cycles import list_stage_events, save_cycle, set_cycle_config
from store.repositories.llm_replies import list_citations, list_faults, list_replies, stage_costs
from store.repositories.trajectories import TrajectoryFilter, list_trajectories, save_trajectories, update_outcome
from store.types import Capability, EndCause, Label, Outcome, Trajectory, Verdict
from tests.desk import DESK
from tests.scripted_analyst import ANSWERING, VERIFICATION, ScriptedQuestion, Thinking
from tests.scripted_model import Scripted, ScriptedReply, Status, scripted_server
from tests.unit.agents.synthesis.conversations import FAULTS
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.evaluation.gate import GatePolicy
from traced.inference.model_files import ModelFiles
from traced.pipeline import gate
from traced.pipeline.analyze import analysis_context, analyze, stored_findings, to_analyze
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.episodes import BASE, Player
from traced.pipeline.findings import compare
from traced.pipeline.production import JUDGED_ANEW
from traced.processes.job import FaultAttribution, JobOutcome, attribute_fault, describe
from traced.targets.desk import demonstrate

CYCLE, EPISODES, RUNS = "desk-1", 24, 2
CANARIES = ("canary-part", "canary-detail", "canary-id")
NOTHING = Progress(Console(file=StringIO()))


def episode(number: int, cycle: str = CYCLE) -> Trajectory:
    """A desk's episode with something that nobody may see in whatever is private."""
    output = demonstrate(number, FAULTS, 1)
    hidden: dict[str, Any] = {
        "parts": {"canary-part": 1.0},
        "detail": "canary-detail",
        "id": f"canary-id-{cycle}-{number:03}",
    }
    return replace(output, model="base", cycle_id=cycle, **hidden)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """A cycle that has collected."""
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, Cycle(CYCLE, "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(session, [episode(number) for number in range(EPISODES)])
    yield Context(load_settings(tmp_path), store, DESK, ModelFiles("tiny", tmp_path), CYCLE, NOTHING, Meter())
    store.dispose()


def with_analyst(server: Scripted, context: Context, **changes: Any) -> Context:
    """The same, analysed by a server's model."""
    llm = {"llm.base_url": server.url, "llm.model": "scripted", "analysis.analyst": "llm", "analysis.runs": RUNS}
    return replace(context, settings=load_settings(context.data_dir, llm | changes))


def stage_detail(context: Context) -> dict[str, Any]:
    with read_session(context.store) as session:
        events = list_stage_events(session, context.cycle_id)
    return [event.detail for event in events if event.state is StageState.FINISHED][-1]


def by_name(context: Context) -> dict[str, Finding]:
    return {item.capability: item for item in stored_findings(context)}


@pytest.mark.parametrize(("outcome", "word"), [(Outcome.FAILURE, "failed"), (Outcome.SUCCESS, "succeeded")])
async def test_without_a_contrast_the_stage_says_what_is_missing(context: Context, outcome: Outcome, word: str) -> None:
    with write_session(context.store) as session:
        save_cycle(session, Cycle("desk-2", "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(session, [replace(episode(number, "desk-2"), outcome=outcome) for number in range(4)])
    other = replace(context, cycle_id="desk-2")
    assert await analyze(other) == []
    assert other.progress.lines["analyze"].figure == f"nothing to compare: all conversations {word}"


async def test_an_analysis_is_stored_once_with_its_evidence(context: Context) -> None:
    thinking = Thinking()
    with scripted_server(thinking, canaries=CANARIES) as server:
        retained = await analyze(with_analyst(server, context))
        question, output = len(server.requests), stage_detail(context)
        assert await analyze(with_analyst(server, context)) == retained
        assert len(server.requests) == question
    findings = by_name(context)
    assert set(findings) == {VERIFICATION["name"], ANSWERING["name"]}
    item = findings[VERIFICATION["name"]]
    assert (item.runs, item.agreement) == (RUNS, 1.0)
    assert None not in (item.delta, item.delta_low, item.delta_high, item.coverage_low, item.coverage_high)
    with read_session(context.store) as session:
        labels, faults = list_labels(session, CYCLE), list_faults(session, CYCLE)
        citation, replies = list_citations(session, CYCLE), list_replies(session, CYCLE, stage="analyze")
    assert len(labels) == EPISODES * 2 * RUNS
    assert {(label.verdict is Verdict.NA) == (label.message_index is None) for label in labels} == {True}
    assert [item.position for item in citation if item.capability == VERIFICATION["name"]] == [0, 1, 2]
    assert len(faults) == sum(episode(number).outcome is Outcome.FAILURE for number in range(EPISODES))
    assert len(replies) == question
    assert (output["analyst"], output["mined"], output["faults"]) == ("llm", EPISODES, {"agent": len(faults)})


async def test_an_unavailable_model_costs_only_the_requests_in_flight(context: Context) -> None:
    """Half of the answers, then the key is refused; the same command asks only the other questions."""
    thinking, limit = Thinking(), 30

    def closing(body: dict[str, Any], nth: int) -> ScriptedReply:
        return thinking(body, nth) if nth < limit else Status(401, message="no such key")

    with (
        scripted_server(closing, canaries=CANARIES) as server,
        pytest.raises(ModelDenied, match="the llm analyst") as raised,
    ):
        await analyze(with_analyst(server, context))
    assert (
        attribute_fault(JobOutcome.FAILED, describe(raised.value), None) is FaultAttribution.INFRASTRUCTURE
    )  # a service waits for the key
    assert stored_findings(context) == []
    with read_session(context.store) as session:
        reply_count = len(list_replies(session, CYCLE))
    assert limit - Endpoint.concurrency < reply_count <= limit  # an answer on its way when the 401 arrives may be lost
    second = Thinking()
    with scripted_server(second, canaries=CANARIES) as server:
        await analyze(with_analyst(server, context))
    with read_session(context.store) as session:
        billed = len(list_replies(session, CYCLE))
    assert billed == reply_count + sum(second.kinds.values())
    failures = sum(episode(number).outcome is Outcome.FAILURE for number in range(EPISODES))
    # As many as an analysis takes that nothing disturbs: each seed is a task of its own.
    assert billed == failures + 1 + EPISODES * RUNS


async def test_production_is_analysed_too_without_trajectories_rejudged_meanwhile(context: Context) -> None:
    reports_seen = [
        replace(episode(900 + n), id=f"canary-id-router-{n}", split="", cycle_id=None, end_cause=EndCause.SILENCE)
        for n in range(10)
    ]
    changed = reports_seen[3]
    other = Outcome.FAILURE if changed.outcome is Outcome.SUCCESS else Outcome.SUCCESS
    with write_session(context.store) as session:
        save_trajectories(session, reports_seen)

    def interleave(question: ScriptedQuestion) -> ScriptedReply | None:
        if question.kind == "aggregate":
            with write_session(context.store) as session:
                assert update_outcome(session, replace(changed, outcome=other))
        return None

    with scripted_server(Thinking(interleave), canaries=CANARIES) as server:
        await analyze(with_analyst(server, context))
    assert (stage_detail(context)["production"], stage_detail(context)["left_out"]) == (9, {JUDGED_ANEW: 1})
    with read_session(context.store) as session:
        ids = {label.trajectory_id for label in list_labels(session, CYCLE)}
        ids |= {fault.trajectory_id for fault in list_faults(session, CYCLE)}
        ids |= {citation.trajectory_id for citation in list_citations(session, CYCLE)}
    assert changed.id not in ids
    assert reports_seen[4].id in ids


async def test_a_capability_of_an_earlier_cycle_keeps_its_name_and_texts(context: Context) -> None:
    first = Capability("looks-before-changes", "Old title", "Old.", "old", "old", "old")
    elsewhere = replace(first, name="plain-answer", title="Another target's")
    with write_session(context.store) as session:
        for cycle, source, known_items in (("desk-0", "desk", first), ("other-0", "shop", elsewhere)):
            save_cycle(session, Cycle(cycle, source, "bundled", 0, {}, CycleState.FINISHED, T0))
            save_capabilities(session, cycle, [known_items])
    with scripted_server(Thinking(), canaries=CANARIES) as server:
        await analyze(with_analyst(server, context))
        question, at = len(server.requests), with_analyst(server, context)
        second_result = await compare(analysis_context(at), to_analyze(at), ["llm"], lambda *_: None)
        assert len(server.requests) == question
    with read_session(context.store) as session:
        retained = {item.name: item for item in list_capabilities(session, CYCLE)}
    assert set(retained) == {"looks-before-changes", "plain-answers"}
    assert retained["looks-before-changes"] == first
    assert {item.capability for item in second_result.sides[0].findings} == set(
        retained
    )  # found once more, it is known still


async def test_a_gate_uses_the_model_for_a_capability_without_a_detector(context: Context) -> None:
    thinking = Thinking()
    base = [episode(number) for number in range(10, 20)]  # three of them change nothing
    with write_session(context.store) as session:
        save_capabilities(session, CYCLE, [Capability(**VERIFICATION)])

    async def exercising(at: Context) -> set[str]:
        displayed = RunningStage(NOTHING, "gate")
        NOTHING.start(displayed.key, "Gate")
        sides = gate.Sides(((CYCLE, VERIFICATION["name"]),), "", Player(BASE), Player("x@v1"))
        rounds = gate._Rounds(at, sides, GatePolicy(), at.target, at.target, displayed)  # type: ignore[arg-type]
        await rounds._add_needs(base)
        return rounds.needs.exercising

    with scripted_server(thinking, canaries=CANARIES) as server:
        tasks = await exercising(with_analyst(server, context))
        assert await exercising(with_analyst(server, context)) == tasks
    assert thinking.kinds == {"label": len(base)}
    instance = {item.task_id: {call.name for call in transcript(item).calls} for item in base}
    assert tasks == {task for task, calls in instance.items() if calls & CHANGES}
    assert len(tasks) == len(base) - 3
    with read_session(context.store) as session:
        (cost,) = stage_costs(session, CYCLE)
    assert (cost.stage, cost.capability, cost.calls) == ("gate", VERIFICATION["name"], len(base))


@pytest.mark.parametrize(
    ("reason", "analyst", "asks"),
    [("", "builtin", False), ("It is so.", "builtin", True), ("", "llm", True)],  # the last: as an earlier version did
)
async def test_a_gate_labels_with_the_analyst_that_found_the_capability(
    context: Context, reason: str, analyst: str, asks: bool
) -> None:
    """Its texts need not be those of today's catalogue."""
    name, base = "precondition-verification", [episode(number) for number in range(10, 20)]
    with write_session(context.store) as session:
        set_cycle_config(session, CYCLE, {"analysis": {"analyst": analyst}})
        save_capabilities(session, CYCLE, [Capability(**VERIFICATION | {"name": name})])
        key = list_trajectories(session, TrajectoryFilter())[0].id
        save_labels(session, CYCLE, [Label(key, name, 0, Verdict.LACKING, 1, reason)])
    displayed = RunningStage(NOTHING, "gate")
    NOTHING.start(displayed.key, "Gate")
    sides = gate.Sides(((CYCLE, name),), "", Player(BASE), Player("x@v1"))
    thinking = Thinking()
    with scripted_server(thinking, canaries=CANARIES) as server:
        at = with_analyst(server, context)
        rounds = gate._Rounds(at, sides, GatePolicy(), at.target, at.target, displayed)  # type: ignore[arg-type]
        await rounds._add_needs(base)
    assert thinking.kinds == ({"label": len(base)} if asks else {})


CHANGES = {"return_item", "exchange_item", "cancel_order", "schedule_pickup", "change_payment"}
