"""What a cycle did to the live system is measured against what was live before it, on the same test tasks."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from store.records import Cycle, CycleState, Finding, StageState
from store.repositories.cycles import list_stage_events, save_cycle, set_cycle_state
from store.repositories.routers import save_composition
from store.repositories.trajectories import save_trajectories
from store.types import JsonObject, Outcome, Trajectory
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import later, trajectory
from traced.evaluation.figures import CycleFigures, LiveStep, as_json, step_sentence, verdict
from traced.evaluation.report import cycles_table, summary_table
from traced.pipeline.collect import OUTCOME_COUNTS
from traced.pipeline.context import Context
from traced.pipeline.report import gather
from traced.pipeline.step import is_incumbent_untested, live_step
from traced.routing.composition import Candidate, Choice, Composition
from traced.routing.composition import as_json as composition_as_json

COMPOSITION = {"composition": {"serving": "a@v1"}}


def episodes(cycle_id: str, model: str, successes: int) -> list[Trajectory]:
    """Return the test episodes of 40 tasks, of which so many are solved."""
    return [
        trajectory(
            f"{cycle_id}-{model}-{task}",
            Outcome.SUCCESS if task < successes else Outcome.FAILURE,
            split="test",
            task_id=str(task),
            model=model,
            temperature=0.0,
            cycle_id=cycle_id,
        )
        for task in range(40)
    ]


def add(
    context: Context, cycle_id: str, minutes: int, rows: Sequence[Trajectory], summary: JsonObject | None = None
) -> None:
    with context.write_session() as session:
        save_cycle(session, Cycle(cycle_id, "desk", "bundled", 0, {}, CycleState.RUNNING, later(minutes)))
        save_trajectories(session, rows)
        set_cycle_state(session, cycle_id, CycleState.FINISHED, at=later(minutes + 1), summary=summary)


def step_of(context: Context, cycle_id: str, rows: Sequence[Trajectory]) -> LiveStep:
    arms: dict[str, list[Trajectory]] = {}
    for row in rows:
        arms.setdefault(row.model, []).append(row)
    with context.read_session() as session:
        return live_step(session, cycle_id, arms, list_stage_events(session, cycle_id))


def test_each_cycle_is_compared_with_what_was_live_before_it(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        first = [*episodes("f1", "base", 10), *episodes("f1", "a@v1", 20)]
        add(context, "f1", 100, first, COMPOSITION)
        # A cycle that promotes nothing, and one that does.
        nothing = episodes("f2", "base", 10)
        add(context, "f2", 200, nothing, {})
        second = [*episodes("f3", "base", 10), *episodes("f3", "routed", 30)]
        add(context, "f3", 300, second, {})
        for cycle_id in ("f2", "f3"):
            context_of = Context(**{**vars(context), "cycle_id": cycle_id})
            composition = asdict(Composition(("a@v1",)))
            context_of.event("incumbent", StageState.FINISHED, composition=composition, live=["a@v1"], promoted_at=None)
        step = step_of(context, "f1", [*first, *episodes("f1", "routed", 20)])
        assert (step.is_first, step.gain and step.gain.difference) == (True, 0.25)
        assert step.initial_success
        assert step.initial_success.rate == 0.25
        step = step_of(context, "f2", nothing)
        assert (step.gain, step.success and step.success.rate) == (None, 0.5)
        step = step_of(context, "f3", second)
        assert (step.gain and step.gain.difference, step.success and step.success.rate) == (0.25, 0.75)
        assert step.initial_success
        assert step.initial_success.rate == 0.5
        assert "Live now minus live before: +25.0 [" in step_sentence(step)
        assert "Live before: a@v1." in step_sentence(step)
        assert step.fallen == []
        context_of.event("attribute", StageState.FINISHED, watch=[{"adapter": "a@v1", "fallen": True}])
        assert "The live system has fallen in the environments of a@v1." in step_sentence(
            step_of(context, "f3", second)
        )


def test_a_live_system_that_no_cycle_has_measured_has_no_success(tmp_path: Path) -> None:
    """What the earlier cycle tested was rolled back since."""
    with context_with_chain(tmp_path, {}) as context:
        add(context, "f1", 100, [*episodes("f1", "base", 10), *episodes("f1", "a@v1", 20)], COMPOSITION)
        add(context, "f2", 200, episodes("f2", "base", 10), {})
        other = Context(**{**vars(context), "cycle_id": "f2"})
        composition = asdict(Composition(("b@v1",)))
        other.event("incumbent", StageState.FINISHED, composition=composition, live=["b@v1"], promoted_at=None)
        assert step_of(context, "f2", episodes("f2", "base", 10)).success is None
        with context.read_session() as session:
            assert (is_incumbent_untested(session, "f1"), is_incumbent_untested(session, "f2")) == (False, True)


def test_the_success_of_recorded_conversations_is_that_before_the_cycle(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        add(context, "f1", 100, [])
        assert step_of(context, "f1", []).initial_success is None
        context_of = Context(**{**vars(context), "cycle_id": "f1"})
        detail: dict[str, Any] = {OUTCOME_COUNTS: {"success": 30, "failure": 10}}
        context_of.event("collect", StageState.FINISHED, **detail)
        initial = step_of(context, "f1", []).initial_success
        assert initial is not None
        assert (initial.episodes, initial.successes, initial.rate) == (40, 30, 0.75)
        assert 0.55 < initial.low < 0.65 < initial.high < 0.9
        text = step_sentence(LiveStep("the live system (a@v1)", False, initial_success=initial))
        assert text.startswith("Live before: a@v1. It solved 75.0 % [")
        assert text.endswith("] of 40 conversations.")


def test_episodes_at_another_temperature_are_no_comparison(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        add(context, "f1", 100, episodes("f1", "a@v1", 20), COMPOSITION)
        composition = asdict(Composition(("a@v1",)))
        for number, temperature in enumerate((0.0, 0.7)):
            config = {"engine": {"temperature": temperature}}
            cycle = Cycle(f"g{number}", "desk", "bundled", 0, config, CycleState.RUNNING, later(200))
            with context.write_session() as session:
                save_cycle(session, cycle)
            context_of = Context(**{**vars(context), "cycle_id": cycle.id})
            context_of.event("incumbent", StageState.FINISHED, composition=composition, live=["a@v1"], promoted_at=None)
        with context.read_session() as session:
            assert (is_incumbent_untested(session, "g0"), is_incumbent_untested(session, "g1")) == (False, True)


def test_a_live_system_that_its_own_cycle_has_tested_is_compared_with_that(tmp_path: Path) -> None:
    """The episodes of the cycle that promoted it were pruned; the cycle after that finds those of this one."""
    with context_with_chain(tmp_path, {}) as context:
        second = [*episodes("f2", "base", 10), *episodes("f2", "incumbent", 20), *episodes("f2", "routed", 30)]
        add(context, "f2", 200, second, {"composition": {"serving": "c@v1"}})
        add(context, "f3", 300, third := [*episodes("f3", "base", 10), *episodes("f3", "routed", 25)], {})
        for cycle_id in ("f2", "f3"):
            context_of = Context(**{**vars(context), "cycle_id": cycle_id})
            composition = asdict(Composition(("a@v1",)))
            context_of.event("incumbent", StageState.FINISHED, composition=composition, live=["a@v1"], promoted_at=None)
        for cycle_id, rows, gain in (("f2", second, 0.25), ("f3", third, 0.125)):
            step = step_of(context, cycle_id, rows)
            assert step.gain is not None
            assert step.gain.difference == gain
        with context.read_session() as session:
            assert (is_incumbent_untested(session, "f2"), is_incumbent_untested(session, "f3")) == (True, False)


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_router_over_other_versions_is_another_live_system(tmp_path: Path, is_recorded: bool) -> None:
    """The version that the second cycle added was rolled back; earlier releases recorded only the choice."""
    models = {"f1": ("a@v1", "b@v1"), "f2": ("c@v1", "a@v1", "b@v1")}
    with context_with_chain(tmp_path, {}) as context:
        for number, (cycle_id, names) in enumerate(models.items(), start=1):
            summary: JsonObject = {"composition": {"serving": "router by labels"}}
            add(context, cycle_id, 100 * number, episodes(cycle_id, "routed", 10 * number), summary)
            context_of = Context(**{**vars(context), "cycle_id": cycle_id})
            composition = Composition(names, "labels")
            if is_recorded:
                context_of.event("evaluate routed", StageState.FINISHED, composition=asdict(composition))
                continue
            context_of.event("promote", StageState.FINISHED, promoted=names[:1], live=sorted(names))
            choice = Choice(names, (Candidate(composition, 10, 5),), Composition())
            with context.write_session() as session:
                save_composition(session, cycle_id, composition_as_json(choice), at=later(100 * number))
        for cycle_id, live in (("f3", ("b@v1", "a@v1")), ("f4", ("b@v1",))):
            add(context, cycle_id, 300, [], {})
            composition = Composition(live, "labels")
            context_of = Context(**{**vars(context), "cycle_id": cycle_id})
            context_of.event(
                "incumbent", StageState.FINISHED, composition=asdict(composition), live=live, promoted_at=None
            )
        success = step_of(context, "f3", []).success
        assert success is not None
        assert success.rate == 0.25
        with context.read_session() as session:
            assert (is_incumbent_untested(session, "f3"), is_incumbent_untested(session, "f4")) == (False, True)


def test_grpo_on_the_target_is_compared_with_what_is_live_where_nothing_was_promoted(tmp_path: Path) -> None:
    with context_with_chain(tmp_path, {}) as context:
        add(context, "f1", 100, [*episodes("f1", "base", 10), *episodes("f1", "a@v1", 20)], COMPOSITION)
        add(context, "f2", 200, [*episodes("f2", "base", 10), *episodes("f2", "grpo-on-target", 30)], {})
        second = Context(**{**vars(context), "cycle_id": "f2"})
        composition = asdict(Composition(("a@v1",)))
        second.event("incumbent", StageState.FINISHED, composition=composition, live=["a@v1"], promoted_at=None)
        over_direct = gather(second).over_direct
    assert over_direct is not None
    assert over_direct.gain.difference == -0.25


def test_a_report_leaves_out_what_was_lost(tmp_path: Path) -> None:
    """Its cycle has been evaluated, so no run of it plays lost episodes again."""
    rows = [*episodes("f1", "base", 10), *episodes("f1", "routed", 20)]
    rows[:8] = [replace(row, outcome=Outcome.INFRASTRUCTURE) for row in rows[:8]]
    with context_with_chain(tmp_path, {}) as context:
        add(context, "f1", 100, rows)
        figures = gather(Context(**{**vars(context), "cycle_id": "f1"}))
    assert figures.gain is not None
    assert (figures.gain.tasks, figures.gain.difference) == (32, 10 / 32)
    assert figures.rates["base"].infrastructure == 8


def test_a_cycle_with_nothing_worth_training_says_why() -> None:
    finding = Finding("c2", "refunds", 0.4, 0.3, 0.1, 0.5, 10, 10, True, {})
    step = LiveStep("the live system (a@v1)", False, left_aside={"refunds": "its last trainings failed (c0, c1)"})
    figures = CycleFigures("c2", "desk", "bundled", 0, findings=[finding], step=step)
    assert verdict(figures) == "Nothing was worth training: refunds: its last trainings failed (c0, c1)."
    assert step_sentence(step).endswith("Left aside: refunds, its last trainings failed (c0, c1).")


def test_the_steps_of_all_cycles_stand_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    step = LiveStep("the live system (a@v1)", False, closed=["dates"], is_target_changed=True)
    summary = as_json(CycleFigures("c2", "desk", "bundled", 0, step=step))
    Console(width=140).print(cycles_table({"c1": {}, "c2": summary}))
    Console(width=140).print(summary_table(CycleFigures("c2", "desk", "bundled", 0, step=step)))
    lines = capsys.readouterr().out
    assert "dates" in lines
    assert "The target has changed" in lines
