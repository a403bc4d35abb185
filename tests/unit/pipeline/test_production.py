"""Production in a cycle's analysis: what counts, what is left out, and that the evidence stays what it was."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agents.synthesizer.builtin import synthesize as write_environment
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Cycle, CycleState, Exchange, Finding, StageState
from store.repositories.capabilities import count_labelled, list_labels
from store.repositories.cycles import list_stage_events, save_cycle
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import get_trajectory, newest_judged_ids, save_trajectories, update_outcome
from store.types import EndCause, Label, Message, Outcome, Trajectory, Verdict
from tests.unit.agents.synthesis.conversations import FAULTS, capability, demonstrations
from tests.unit.store.chain import T0, save_origin, trajectory
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import collect
from traced.pipeline import findings as analysts
from traced.pipeline.analyze import analyze, stored_findings
from traced.pipeline.context import Context
from traced.pipeline.findings import contrast_findings
from traced.pipeline.report import gather
from traced.pipeline.synthesize import lacking_openings
from traced.targets.desk import demonstrate
from traced.targets.registry import target

CYCLE, EPISODES = "desk-1", 90
LATE = 10_000


def reported(seed: int, **changes: Any) -> Trajectory:
    """A conversation of the desk as the router settles it: its outcome is what somebody said."""
    told = demonstrate(seed, FAULTS, 1)
    kept = {"split": "", "model": "base", "trial": 0, "end_cause": EndCause.SILENCE, "parts": {}, "cycle_id": None}
    return replace(told, id=f"router-{seed}", **{**kept, **changes})


def exchange(of: str, at: datetime, model: str = "base") -> Exchange:
    return Exchange(f"e-{of}-{at:%S%f}-{model}", f"c-{of}", at, model, 200, 0.1, trajectory_id=of)


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """A cycle that has collected."""
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    episodes = [demonstrate(seed, FAULTS, 1) for seed in range(EPISODES)]
    with write_session(store) as opened:
        save_cycle(opened, Cycle(CYCLE, "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(
            opened, [replace(one, id=f"t{n:03}", model="base", cycle_id=CYCLE) for n, one in enumerate(episodes)]
        )
    settings = load_settings(tmp_path, {"analysis.runs": 2})
    progress = Progress(Console(file=StringIO()))
    yield Context(settings, store, target("desk"), ModelFiles("tiny", tmp_path), CYCLE, progress, Meter())
    store.dispose()


def report(context: Context, *told: Trajectory) -> None:
    with write_session(context.store) as opened:
        save_trajectories(opened, told)


def found(context: Context) -> dict[str, Any]:
    with read_session(context.store) as opened:
        events = list_stage_events(opened, CYCLE)
    return [event.detail for event in events if event.state is StageState.FINISHED][-1]


def analysis(context: Context) -> tuple[list[Finding], list[Label]]:
    asyncio.run(analyze(context))
    with read_session(context.store) as opened:
        return stored_findings(context), list_labels(opened, CYCLE)


def test_only_judged_conversations_that_the_base_model_alone_answered_count_the_newest_first(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    outside: dict[str, Any] = {"split": "", "cycle_id": None}
    made = [trajectory(key, **outside) for key in ("old", "new", "import-a", "import-b", "mixed")]
    made += [trajectory("adapter", **{**outside, "model": "dates@v1"}), trajectory("elsewhere", **outside, source="x")]
    made += [trajectory("unknown", Outcome.UNKNOWN, **outside), trajectory("episode", split="")]
    with write_session(store) as opened:
        save_origin(opened)
        save_trajectories(opened, made)
        times = {"old": 1, "mixed": 9, "adapter": 9, "unknown": 9, "elsewhere": 9}
        save_exchanges(opened, [exchange(key, T0 + timedelta(seconds=at)) for key, at in times.items()])
        save_exchanges(opened, [exchange("new", T0), exchange("new", T0 + timedelta(seconds=5))])
        save_exchanges(opened, [exchange("mixed", T0, "dates@v1")])
    with read_session(store) as opened:
        assert newest_judged_ids(opened, "desk", "base", limit=9) == ["new", "old", "import-a", "import-b"]
        assert newest_judged_ids(opened, "desk", "base", limit=1) == ["new"]
        assert newest_judged_ids(opened, "desk", "base", limit=0) == []
    store.dispose()


SYSTEM, USER, AGENT = (
    {"role": role, "content": text} for role, text in (("system", "Be exact."), ("user", "Hi"), ("assistant", "Hello"))
)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([SYSTEM, USER, AGENT], ""),
        ([{**SYSTEM, "role": "developer"}, SYSTEM, USER, AGENT], ""),
        ([USER, AGENT], collect.NO_SYSTEM),
        ([USER, SYSTEM, AGENT], collect.NO_SYSTEM),
        ([{**SYSTEM, "content": " "}, USER, AGENT], collect.NO_SYSTEM),
        ([SYSTEM, AGENT, USER], collect.NO_OPENING),
        ([SYSTEM, {"role": "tool", "content": "{}"}, USER, AGENT], collect.NO_OPENING),
        ([SYSTEM], collect.NO_OPENING),
        ([], collect.NO_SYSTEM),
        ([SYSTEM, {"content": "Hi"}], collect.UNREADABLE),
        ([SYSTEM, USER, {**AGENT, "tool_calls": {"a": 1}}], collect.UNREADABLE),
        ([SYSTEM, USER, {**AGENT, "tool_calls": [{"function": "f"}]}], collect.UNREADABLE),
    ],
)
def test_a_conversation_that_cannot_be_read_from_its_beginning_is_left_out(messages: list[Message], why: str) -> None:
    told = collect.select_comparable([replace(reported(1), messages=messages)], [reported(2)])
    assert told.left_out == ({why: 1} if why else {})
    assert len(told.trajectories) == (not why)


def test_tools_are_the_same_by_their_names_and_parameters_and_the_targets_own_are_kept() -> None:
    own = reported(2)
    reworded = json.loads(json.dumps(own.tools))[::-1]
    for tool in reworded:
        tool["function"]["description"] = "another"
        tool["function"]["parameters"]["additionalProperties"] = False
    flat = [tool["function"] for tool in own.tools]
    renamed = json.loads(json.dumps(own.tools).replace("order_id", "order_number"))
    for tools, kept in ((reworded, 1), (flat, 1), (own.tools[1:], 0), ([*own.tools, own.tools[0] | {}], 1), ([], 0)):
        told = collect.select_comparable([replace(reported(1), tools=tools)], [own])
        assert [one.tools for one in told.trajectories] == [own.tools] * kept
        assert told.left_out == ({} if kept else {collect.OTHER_TOOLS: 1})
    for tools in (renamed, [*own.tools, {"type": "function", "function": {"name": "more"}}], ["odd"]):
        assert collect.select_comparable([replace(reported(1), tools=tools)], [own]).left_out == {
            collect.OTHER_TOOLS: 1
        }


def test_without_production_an_analysis_is_what_it_was(context: Context) -> None:
    report(context, reported(LATE, outcome=Outcome.UNKNOWN), reported(LATE + 1, model="dates@v1"))
    with_none = analysis(context)
    assert found(context)["production"] == 0
    assert found(context)["left_out"] == {}
    with read_session(context.store) as opened:
        trajectories = collect.analyzed(opened, CYCLE)
    told = analysts._builtin(trajectories, 2, 0)
    capabilities, labels = told.capabilities, told.labels
    assert with_none[1] == sorted(labels, key=lambda one: (one.run, one.capability, one.trajectory_id))
    outcomes = {one.id: one.outcome for one in trajectories}
    again = contrast_findings(CYCLE, labels, outcomes, context.settings.analysis, 0)
    assert sorted(with_none[0], key=lambda one: one.capability) == again
    assert len(capabilities) == len(again)


def test_production_is_analysed_beside_the_episodes_once_and_for_good(context: Context) -> None:
    report(context, *(reported(LATE + n) for n in range(20)), reported(LATE + 90, tools=[]))
    findings, labels = analysis(context)
    assert found(context) == {
        "episodes": EPISODES,
        "production": 20,
        "left_out": {collect.OTHER_TOOLS: 1},
        "retained": [one.capability for one in findings if one.retained],
    }
    assert {f"router-{LATE + n}" for n in range(20)} < {label.trajectory_id for label in labels}
    with write_session(context.store) as opened:
        judged = get_trajectory(opened, f"router-{LATE}")
        assert not update_outcome(opened, replace(judged, outcome=Outcome.SUCCESS, reward=1.0))
    report(context, *(reported(LATE + 20 + n) for n in range(20)))
    assert analysis(context) == (findings, labels)
    with read_session(context.store) as opened:
        assert count_labelled(opened, CYCLE) == (20, EPISODES)
    assert gather(context).analysed == {"episodes": EPISODES, "production": 20}


def test_the_newest_so_many_are_analysed(context: Context) -> None:
    report(context, *(reported(LATE + n) for n in range(9)))
    with write_session(context.store) as opened:
        save_exchanges(opened, [exchange(f"router-{LATE + n}", T0 + timedelta(seconds=n)) for n in range(9)])
    settings = load_settings(context.data_dir, {"analysis.runs": 2, "analysis.production": 4})
    _, labels = analysis(replace(context, settings=settings))
    told = {label.trajectory_id for label in labels if label.trajectory_id.startswith("router")}
    assert told == {f"router-{LATE + n}" for n in range(5, 9)}


def test_feedback_and_pruning_during_the_analysis_leave_no_label_of_another_outcome(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(context, *(reported(LATE + n) for n in range(12)))
    changed = reported(LATE + 3)
    other = Outcome.FAILURE if changed.outcome is Outcome.SUCCESS else Outcome.SUCCESS
    builtin = analysts._builtin

    def slow(*given: Any) -> Any:
        with write_session(context.store) as opened:
            assert update_outcome(opened, replace(changed, outcome=other))
            opened.connection().exec_driver_sql(f"DELETE FROM trajectories WHERE id = 'router-{LATE + 4}'")
        return builtin(*given)

    monkeypatch.setattr(analysts, "_builtin", slow)
    _, labels = analysis(context)
    assert found(context)["left_out"] == {collect.JUDGED_ANEW: 2}
    assert found(context)["production"] == 10
    assert not {f"router-{LATE + 3}", f"router-{LATE + 4}"} & {one.trajectory_id for one in labels}


def test_the_openings_of_failures_that_lacked_it_are_told_to_the_synthesizer() -> None:
    told = [reported(1, outcome=Outcome.FAILURE), reported(2, outcome=Outcome.SUCCESS)]
    told += [replace(told[0], id="present"), replace(told[0], id="half")]
    lacking = {"router-1": 2, "router-2": 2, "half": 1}
    labels = [
        Label(one.id, "x", run, Verdict.LACKING if run < lacking.get(one.id, 0) else Verdict.PRESENT)
        for one in told
        for run in range(2)
    ]
    (opening,) = lacking_openings(told, labels, "x")
    assert opening == next(one["content"] for one in told[0].messages if one["role"] == "user")


def test_production_weighs_the_kinds_of_request_and_no_word_of_it_is_written() -> None:
    meant = capability("multi-step-completion")
    trajectories, labels = demonstrations(120)
    alone = write_environment(meant, trajectories, labels, seed=0)
    own = [one.messages[1]["content"] for one in trajectories if one.outcome is Outcome.FAILURE]
    asked = [f"{own[0]} Zebulon Quist asks." for _ in range(200)]
    beside = write_environment(meant, trajectories, labels, seed=0, extra_openings=asked)
    assert beside != alone
    assert "Zebulon" not in beside
    assert len(beside) == pytest.approx(len(alone), abs=2000)  # other weights of the same kinds


def test_a_cycle_with_production_is_synthesized_from_its_episodes_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from traced.pipeline import synthesize

    report(context, *(reported(LATE + n, outcome=Outcome.FAILURE) for n in range(20)))
    kept = asyncio.run(analyze(context))
    seen: dict[str, Any] = {}

    def write(meant: Any, trajectories: Any, labels: Any, **told: Any) -> str:
        seen.update(told, trajectories=trajectories, labels=labels)
        return "class Environment: pass\n"

    monkeypatch.setattr(synthesize, "write_environment", write)
    asyncio.run(synthesize.synthesize(context, kept[0], 0))
    assert len(seen["trajectories"]) == EPISODES
    assert {label.trajectory_id for label in seen["labels"]} == {one.id for one in seen["trajectories"]}
    assert seen["extra_openings"]
