"""Production in a cycle's analysis: what counts, what is left out, and that the evidence stays what it was."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from agents.synthesizer.builtin import synthesize as write_environment
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import WITHIN_TASKS, Cycle, CycleState, Exchange, Finding, StageState
from store.repositories.capabilities import count_labelled, list_labels
from store.repositories.cycles import list_stage_events, save_cycle
from store.repositories.serving import save_exchanges
from store.repositories.trajectories import get_trajectory, newest_judged_ids, save_trajectories, update_outcome
from store.types import EndCause, Label, Message, Outcome, Trajectory, Verdict
from tests.desk import DESK
from tests.unit.agents.synthesis.conversations import FAULTS, capability, demonstrations
from tests.unit.store.chain import T0, save_origin, trajectory
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import collect, incumbent, production, routers
from traced.pipeline import findings as analysts
from traced.pipeline.analyze import analyze, stored_findings
from traced.pipeline.context import Context
from traced.pipeline.findings import contrast_findings
from traced.pipeline.incumbent import Incumbent
from traced.pipeline.report import gather
from traced.pipeline.synthesize import lacking_openings
from traced.routing.composition import Composition
from traced.targets.desk import demonstrate

CYCLE, EPISODES = "desk-1", 90
LATE = 10_000


def reported_conversation(seed: int, **changes: Any) -> Trajectory:
    """Create a production conversation of the desk with a reported outcome."""
    selection = demonstrate(seed, FAULTS, 1)
    expected = {"split": "", "model": "base", "trial": 0, "end_cause": EndCause.SILENCE, "parts": {}, "cycle_id": None}
    return replace(selection, id=f"router-{seed}", **{**expected, **changes})


def exchange(conversation: str, at: datetime, model: str = "base") -> Exchange:
    return Exchange(
        f"e-{conversation}-{at:%S%f}-{model}", f"c-{conversation}", at, model, 200, 0.1, trajectory_id=conversation
    )


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    """Create the context of a cycle after its collect stage."""
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    episodes = [demonstrate(seed, FAULTS, 1) for seed in range(EPISODES)]
    with write_session(store) as session:
        save_cycle(session, Cycle(CYCLE, "desk", "bundled", 0, {}, CycleState.RUNNING, T0))
        save_trajectories(
            session, [replace(item, id=f"t{n:03}", model="base", cycle_id=CYCLE) for n, item in enumerate(episodes)]
        )
    settings = load_settings(tmp_path, {"analysis.runs": 2})
    progress = Progress(Console(file=StringIO()))
    yield Context(settings, store, DESK, ModelFiles("tiny", tmp_path), CYCLE, progress, Meter())
    store.dispose()


def report(context: Context, *selection: Trajectory) -> None:
    with write_session(context.store) as session:
        save_trajectories(session, selection)


def rows(context: Context) -> dict[str, Any]:
    with read_session(context.store) as session:
        events = list_stage_events(session, CYCLE)
    return [event.detail for event in events if event.state is StageState.FINISHED][-1]


async def analysis(context: Context) -> tuple[list[Finding], list[Label]]:
    await analyze(context)
    with read_session(context.store) as session:
        return stored_findings(context), list_labels(session, CYCLE)


def test_only_judged_conversations_that_the_base_model_alone_answered_count_the_newest_first(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    outside: dict[str, Any] = {"split": "", "cycle_id": None}
    trajectories = [trajectory(key, **outside) for key in ("old", "new", "import-a", "import-b", "mixed")]
    trajectories += [
        trajectory("adapter", **{**outside, "model": "dates@v1"}),
        trajectory("elsewhere", **outside, source="x"),
    ]
    trajectories += [trajectory("unknown", Outcome.UNKNOWN, **outside), trajectory("episode", split="")]
    with write_session(store) as session:
        save_origin(session)
        save_trajectories(session, trajectories)
        times = {"old": 1, "mixed": 9, "adapter": 9, "unknown": 9, "elsewhere": 9}
        save_exchanges(session, [exchange(key, T0 + timedelta(seconds=at)) for key, at in times.items()])
        save_exchanges(session, [exchange("new", T0), exchange("new", T0 + timedelta(seconds=5))])
        save_exchanges(session, [exchange("mixed", T0, "dates@v1")])
    with read_session(store) as session:
        assert newest_judged_ids(session, "desk", ["base"], limit=9) == ["new", "old", "import-a", "import-b"]
        assert newest_judged_ids(session, "desk", ["base"], limit=1) == ["new"]
        assert newest_judged_ids(session, "desk", ["base"], limit=0) == []
    store.dispose()


def test_a_new_base_model_is_not_analysed_by_conversations_that_another_one_answered(context: Context) -> None:
    report(context, reported_conversation(LATE))
    with write_session(context.store) as session:
        save_exchanges(session, [exchange(f"router-{LATE}", T0)])
    assert [row.id for row in production.production(context, []).trajectories] == []
    episodes = collect.collected(context)
    assert [row.id for row in production.production(context, episodes).trajectories] == [f"router-{LATE}"]
    model = context.settings.model.model_copy(update={"predecessor": "bundled"})
    takeover = replace(context, settings=context.settings.model_copy(update={"model": model}))
    assert production.production(takeover, episodes) == production.Production()


def test_conversations_of_a_live_system_count_from_its_promotion_on(tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    outside: dict[str, Any] = {"split": "", "cycle_id": None}
    late, hours_ago = T0 + timedelta(hours=2), T0 - timedelta(hours=2)
    rows: dict[str, dict[str, Any]] = {
        "base": {"model": "base", "started_at": late},
        "live": {"model": "dates@v1", "started_at": late},
        "before": {"model": "base", "started_at": hours_ago},
        "without-time": {"model": "base"},
        "other": {"model": "dates@v2", "started_at": late},
        "shadow": {"model": "dates@v1", "started_at": late, "end_cause": EndCause.SHADOW},
    }
    with write_session(store) as session:
        save_trajectories(session, [trajectory(key, **outside, **changes) for key, changes in rows.items()])
        models = ["base", "dates@v1"]
        assert newest_judged_ids(session, "desk", models, limit=9, start=T0) == ["base", "live"]
        assert newest_judged_ids(session, "desk", models, limit=9) == ["base", "before", "live", "without-time"]
    store.dispose()


def test_an_analysis_takes_what_the_live_system_answered_since_its_promotion(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Incumbent(Composition(("dates@v1",)), ("dates@v1",), T0)
    monkeypatch.setattr(incumbent, "current_incumbent", lambda *_: live)
    hour = timedelta(hours=1)
    report(
        context,
        reported_conversation(LATE, model="dates@v1", started_at=T0 + hour),
        reported_conversation(LATE + 1, model="dates@v1", started_at=T0 - hour),
        reported_conversation(LATE + 2, model="dates@v2", started_at=T0 + hour),
    )
    episodes = [demonstrate(seed, FAULTS, 1) for seed in range(3)]
    incumbent.incumbent_of(context)
    assert [row.id for row in production.production(context, episodes).trajectories] == [f"router-{LATE}"]


SYSTEM, USER, AGENT = (
    {"role": role, "content": text} for role, text in (("system", "Be exact."), ("user", "Hi"), ("assistant", "Hello"))
)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([SYSTEM, USER, AGENT], ""),
        ([{**SYSTEM, "role": "developer"}, SYSTEM, USER, AGENT], ""),
        ([USER, AGENT], production.NO_SYSTEM),
        ([USER, SYSTEM, AGENT], production.NO_SYSTEM),
        ([{**SYSTEM, "content": " "}, USER, AGENT], production.NO_SYSTEM),
        ([SYSTEM, AGENT, USER], production.NO_OPENING),
        ([SYSTEM, {"role": "tool", "content": "{}"}, USER, AGENT], production.NO_OPENING),
        ([SYSTEM], production.NO_OPENING),
        ([], production.NO_SYSTEM),
        ([SYSTEM, {"content": "Hi"}], production.UNREADABLE),
        ([SYSTEM, USER, {**AGENT, "tool_calls": {"a": 1}}], production.UNREADABLE),
        ([SYSTEM, USER, {**AGENT, "tool_calls": [{"function": "f"}]}], production.UNREADABLE),
    ],
)
def test_a_conversation_that_cannot_be_read_from_its_beginning_is_left_out(
    messages: list[Message], reason: str
) -> None:
    selection = production.select_comparable(
        [replace(reported_conversation(1), messages=messages)], [reported_conversation(2)]
    )
    assert selection.left_out == ({reason: 1} if reason else {})
    assert len(selection.trajectories) == (not reason)


def test_tools_are_the_same_by_their_names_and_parameters_and_the_targets_own_are_kept() -> None:
    episode_openings = reported_conversation(2)
    reworded = json.loads(json.dumps(episode_openings.tools))[::-1]
    for tool in reworded:
        tool["function"]["description"] = "another"
        tool["function"]["parameters"]["additionalProperties"] = False
    flat = [tool["function"] for tool in episode_openings.tools]
    renamed = json.loads(json.dumps(episode_openings.tools).replace("order_id", "order_number"))
    for tools, expected in (
        (reworded, 1),
        (flat, 1),
        (episode_openings.tools[1:], 0),
        ([*episode_openings.tools, episode_openings.tools[0] | {}], 1),
        ([], 0),
    ):
        selection = production.select_comparable([replace(reported_conversation(1), tools=tools)], [episode_openings])
        assert [item.tools for item in selection.trajectories] == [episode_openings.tools] * expected
        assert selection.left_out == ({} if expected else {production.OTHER_TOOLS: 1})
    for tools in (
        renamed,
        [*episode_openings.tools, {"type": "function", "function": {"name": "more"}}],
        cast(Any, ["odd"]),
    ):
        assert production.select_comparable(
            [replace(reported_conversation(1), tools=tools)], [episode_openings]
        ).left_out == {production.OTHER_TOOLS: 1}


async def test_without_production_an_analysis_is_unchanged(context: Context) -> None:
    report(
        context, reported_conversation(LATE, outcome=Outcome.UNKNOWN), reported_conversation(LATE + 1, model="dates@v1")
    )
    with_none = await analysis(context)
    assert rows(context)["production"] == 0
    assert rows(context)["left_out"] == {}
    with read_session(context.store) as session:
        trajectories = routers.analyzed(session, CYCLE)
    selection = analysts._builtin(trajectories, 2, 0)
    capabilities, labels = selection.capabilities, selection.labels
    assert with_none[1] == sorted(labels, key=lambda item: (item.run, item.capability, item.trajectory_id))
    outcomes = {item.id: item.outcome for item in trajectories}
    tasks = analysts.tasks_of(trajectories)
    repeated = contrast_findings(
        CYCLE, labels, outcomes, context.settings.analysis, 0, tasks=tasks, repeated=selection.repeated
    )
    assert sorted(with_none[0], key=lambda item: item.capability) == repeated
    assert len(capabilities) == len(repeated)


async def test_production_is_analysed_beside_the_episodes_once_and_for_good(context: Context) -> None:
    report(context, *(reported_conversation(LATE + n) for n in range(20)), reported_conversation(LATE + 90, tools=[]))
    findings, labels = await analysis(context)
    with read_session(context.store) as session:
        counts = Counter(item.outcome for item in routers.analyzed(session, CYCLE))
    assert rows(context) == {
        "episodes": EPISODES,
        "production": 20,
        "successes": counts[Outcome.SUCCESS],
        "failures": counts[Outcome.FAILURE],
        "left_out": {production.OTHER_TOOLS: 1},
        analysts.MIXED_TASKS: 0,
        analysts.MIXED_FAILURES: 0,
        WITHIN_TASKS: False,
        analysts.UNEXPLAINED: 0,
        analysts.EXPLAINED: {},
        "retained": [item.capability for item in findings if item.retained],
    }
    assert {f"router-{LATE + n}" for n in range(20)} < {label.trajectory_id for label in labels}
    with write_session(context.store) as session:
        conversations = get_trajectory(session, f"router-{LATE}")
        assert not update_outcome(session, replace(conversations, outcome=Outcome.SUCCESS, reward=1.0))
    report(context, *(reported_conversation(LATE + 20 + n) for n in range(20)))
    assert await analysis(context) == (findings, labels)
    with read_session(context.store) as session:
        assert count_labelled(session, CYCLE) == (20, EPISODES)
    figures = gather(context)
    assert figures.analysed == {"episodes": EPISODES, "production": 20}
    assert figures.collected == Counter(item.outcome for item in collect.collected(context))
    assert figures.collected.keys() == {Outcome.SUCCESS, Outcome.FAILURE}


async def test_the_newest_so_many_are_analysed(context: Context) -> None:
    report(context, *(reported_conversation(LATE + n) for n in range(9)))
    with write_session(context.store) as session:
        save_exchanges(session, [exchange(f"router-{LATE + n}", T0 + timedelta(seconds=n)) for n in range(9)])
    settings = load_settings(context.data_dir, {"analysis.runs": 2, "analysis.production": 4})
    _, labels = await analysis(replace(context, settings=settings))
    selection = {label.trajectory_id for label in labels if label.trajectory_id.startswith("router")}
    assert selection == {f"router-{LATE + n}" for n in range(5, 9)}


async def test_feedback_and_pruning_during_the_analysis_leave_no_label_of_another_outcome(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(context, *(reported_conversation(LATE + n) for n in range(12)))
    changed = reported_conversation(LATE + 3)
    other = Outcome.FAILURE if changed.outcome is Outcome.SUCCESS else Outcome.SUCCESS
    builtin = analysts._builtin

    def slow(*arguments: Any) -> Any:
        with write_session(context.store) as session:
            assert update_outcome(session, replace(changed, outcome=other))
            session.connection().exec_driver_sql(f"DELETE FROM trajectories WHERE id = 'router-{LATE + 4}'")
        return builtin(*arguments)

    monkeypatch.setattr(analysts, "_builtin", slow)
    _, labels = await analysis(context)
    assert rows(context)["left_out"] == {production.JUDGED_ANEW: 2}
    assert rows(context)["production"] == 10
    assert not {f"router-{LATE + 3}", f"router-{LATE + 4}"} & {item.trajectory_id for item in labels}


def test_the_synthesizer_receives_openings_of_lacking_failures() -> None:
    selection = [reported_conversation(1, outcome=Outcome.FAILURE), reported_conversation(2, outcome=Outcome.SUCCESS)]
    selection += [replace(selection[0], id="present"), replace(selection[0], id="half")]
    lacking_runs = {"router-1": 2, "router-2": 2, "half": 1}
    labels = [
        Label(item.id, "x", run, Verdict.LACKING if run < lacking_runs.get(item.id, 0) else Verdict.PRESENT)
        for item in selection
        for run in range(2)
    ]
    (first_message,) = lacking_openings(selection, labels, "x")
    assert first_message == next(item["content"] for item in selection[0].messages if item["role"] == "user")


def test_production_weighs_the_kinds_of_request_and_no_word_of_it_is_written() -> None:
    capability_row = capability("multi-step-completion")
    trajectories, labels = demonstrations(120)
    unweighted = write_environment(capability_row, trajectories, labels, seed=0)
    episode_openings = [item.messages[1]["content"] for item in trajectories if item.outcome is Outcome.FAILURE]
    extra_openings = [f"{episode_openings[0]} Zebulon Quist asks." for _ in range(200)]
    weighted = write_environment(capability_row, trajectories, labels, seed=0, extra_openings=extra_openings)
    assert weighted != unweighted
    assert "Zebulon" not in weighted
    assert len(weighted) == pytest.approx(len(unweighted), abs=2000)  # other weights of the same kinds


async def test_a_cycle_with_production_is_synthesized_from_its_episodes_alone(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    from traced.pipeline import synthesize

    report(context, *(reported_conversation(LATE + n, outcome=Outcome.FAILURE) for n in range(20)))
    expected = await analyze(context)
    arguments: dict[str, Any] = {}

    def write(capability_row: Any, trajectories: Any, labels: Any, **selection: Any) -> str:
        arguments.update(selection, trajectories=trajectories, labels=labels)
        return "class Environment: pass\n"

    monkeypatch.setattr(synthesize, "write_environment", write)
    await synthesize.synthesize(context, expected[0], 0)
    assert len(arguments["trajectories"]) == EPISODES
    assert {label.trajectory_id for label in arguments["labels"]} == {item.id for item in arguments["trajectories"]}
    assert arguments["extra_openings"]
