"""The job of a training on the target itself."""

from pathlib import Path

import pytest

from store.records import StageState
from store.repositories.cycles import list_stage_events
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import trajectory
from traced.pipeline import evaluate
from traced.pipeline.context import Context
from traced.routing.routers import RoutingDecision
from traced.training.errors import NothingToLearn, TrainingError
from traced.training.job import TrainingJob

WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"


@pytest.mark.parametrize(("validate_every", "groups", "validation"), [(0, 10, []), (5, 8, [8, 9])])
async def test_a_short_list_of_tasks_is_divided_and_not_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, validate_every: int, groups: int, validation: list[int]
) -> None:
    jobs: list[TrainingJob] = []

    async def record(job: TrainingJob, *_: object) -> None:
        jobs.append(job)
        raise TrainingError("only the job is wanted")

    async def without_servers(context: Context, job: TrainingJob, *_: object) -> TrainingJob:
        return job

    monkeypatch.setattr(evaluate, "run_job", record)
    monkeypatch.setattr(evaluate, "with_servers", without_servers)
    world = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:WithTasks"}
    training: dict[str, object] = {"training.groups": 20, "training.validate_every": validate_every}
    with (
        context_with_chain(tmp_path, {**world, **training}) as context,
        pytest.raises(TrainingError, match="only the job"),
    ):
        await evaluate.grpo_on_target(context, 8)
    (job,) = jobs
    assert (job.seed_low, job.seed_high, job.groups, job.validation) == (0, 10, groups, validation)
    assert not set(job.group_seeds(0)) & set(validation)


async def test_a_training_that_finds_nothing_to_learn_from_ends_the_comparison_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise NothingToLearn("no group was mixed", hint="raise training.rollouts")

    async def without_servers(context: Context, job: TrainingJob, *_: object) -> TrainingJob:
        return job

    notes: list[str] = []
    monkeypatch.setattr(evaluate, "run_job", fail)
    monkeypatch.setattr(evaluate, "with_servers", without_servers)
    world = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:WithTasks"}
    with context_with_chain(tmp_path, world) as context:
        monkeypatch.setattr(context.progress, "note", notes.append)
        await evaluate.grpo_on_target(context, 8)
        with context.read_session() as session:
            event = list_stage_events(session, context.cycle_id)[-1]
    reason = "no group was mixed (try: raise training.rollouts)"
    assert f"the comparison with GRPO on the target has no result: {reason}" in notes
    assert (event.stage, event.state) == ("train", StageState.FINISHED)
    assert event.detail["summary"] == reason


async def test_a_router_that_does_not_serve_leaves_to_the_merged_version_as_well(tmp_path: Path) -> None:
    """What it would leave to the base model goes to the composition's default."""

    class LeavesAll:
        name = "labels"

        async def choose(self, _: object) -> RoutingDecision:
            return RoutingDecision("base", {}, 0.0)

    trajectories = [trajectory("t1"), trajectory("t2", task_id="42")]
    with context_with_chain(tmp_path, {}) as context:
        for default in ("merged@v1", "base"):
            await evaluate._record_other_choices(
                context, "hidden-state", {"labels": LeavesAll()}, trajectories, default
            )
            with context.read_session() as session:
                event = list_stage_events(session, context.cycle_id)[-1]
            assert event.detail["picks"] == {"labels": {"41": default, "42": default}}
