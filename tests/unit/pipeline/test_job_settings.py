"""The settings of a training reach its job."""

from pathlib import Path
from typing import Any

import pytest

from traced.config.settings import load_settings
from traced.pipeline.train import job_for, run_summary
from traced.training.job import TrainingJob, TrainingResult


def job(tmp_path: Path, **training: Any) -> TrainingJob:
    settings = load_settings(tmp_path, {f"training.{key}": value for key, value in training.items()})
    tmp_path.mkdir(exist_ok=True)
    source = {"target": "desk"}
    return job_for(settings, run_id="c/s/e", capability="s", source=source, model=tmp_path, out=tmp_path)


def test_what_a_gpu_needs_is_taken_from_the_settings(tmp_path: Path) -> None:
    values = {"processes": 2, "shard": True, "attention": "eager", "micro_batch_tokens": 99, "report_to": ["wandb"]}
    result = job(tmp_path, **values)
    assert {key: getattr(result, key) for key in values} == values
    assert job(tmp_path, validate_every=0, recoveries=2).recoveries == 0


def test_what_chooses_seeds_and_policy_is_taken_from_the_settings(tmp_path: Path) -> None:
    values = {"open_share": 0.5, "validate_every": 5, "validation_seeds": 7, "recoveries": 2}
    values |= {"recovery_lr": 0.25, "recovery_temperature": 1.5, "kl": 0.1, "entropy_bonus": 0.01}
    values |= {"recovery_kl": 0.2, "recovery_entropy_bonus": 0.02}
    result = job(tmp_path, **values)
    assert {key: getattr(result, key) for key in values} == values
    settings = load_settings(tmp_path, {"engine.temperature": 0.3})
    serving = job_for(settings, run_id="r", capability="s", source={"target": "desk"}, model=tmp_path, out=tmp_path)
    assert serving.validation_temperature == 0.3


def test_only_a_job_with_a_hint_shows_it(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"training.hint_share": 0.5, "training.recovery_hint_share": 0.75})
    fixed: dict[str, Any] = {"run_id": "r", "capability": "s", "model": tmp_path, "out": tmp_path}
    hinted = job_for(settings, source={"environment": "e.py"}, hint="Look twice.", **fixed)
    assert (hinted.hint_share, hinted.recovery_hint_share, hinted.hint) == (0.5, 0.75, "Look twice.")
    unhinted = job_for(settings, source={"target": "desk"}, **fixed)
    assert unhinted.hint_share == unhinted.recovery_hint_share == 0


def test_only_an_environment_shows_its_solutions(tmp_path: Path) -> None:
    settings = load_settings(tmp_path, {"training.demonstrations": 3})
    fixed: dict[str, Any] = {"run_id": "r", "capability": "c", "model": tmp_path, "out": tmp_path}
    jobs = [job_for(settings, source=source, **fixed) for source in ({"environment": "e.py"}, {"target": "desk"})]
    assert [job.demonstrations for job in jobs] == [3, 0]


@pytest.mark.parametrize(("rollouts", "solutions"), [(8, 4), (4, 3), (2, 1)])
def test_one_rollout_of_a_group_is_always_the_policys(tmp_path: Path, rollouts: int, solutions: int) -> None:
    settings = load_settings(tmp_path, {"training.rollouts": rollouts})
    fixed: dict[str, Any] = {"run_id": "r", "capability": "c", "model": tmp_path, "out": tmp_path}
    assert job_for(settings, source={"environment": "e.py"}, **fixed).demonstrations == solutions


def test_a_finished_run_says_how_many_rollouts_the_solution_replaced() -> None:
    result = TrainingResult("a", 9, 0, 1.0, policy=9, validation_episodes=96)
    assert run_summary(result, [{"demonstrations": 8.0}, {}, {"demonstrations": 4.0}]) == (
        "96 validation episodes; the environment's solution replaced 12 rollouts in updates"
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (TrainingResult("a", 60, 0, 1.0, policy=60), ""),
        (TrainingResult("a", 60, 0, 1.0), ""),
        (TrainingResult("a", 60, 0, 1.0, policy=35), "published is the policy after 35 of 60 updates"),
        (TrainingResult("a", 9, 0, 1.0, stalled="s", policy=5), "s; published is the policy after 5 of 9 updates"),
        (TrainingResult("a", 9, 0, 1.0, stalled="s", policy=9, recoveries=["r1", "r2"]), "r1; r2; s"),
        (TrainingResult("a", 9, 0, 1.0, policy=9, validation_episodes=96), "96 validation episodes"),
    ],
)
def test_a_finished_run_says_which_policy_it_published(result: TrainingResult, text: str) -> None:
    assert run_summary(result) == text


@pytest.mark.parametrize(("setting", "value"), [("auto", None), ("on", True), ("off", False)])
def test_recomputation_is_the_devices_choice_unless_set(tmp_path: Path, setting: str, value: bool | None) -> None:
    assert job(tmp_path, gradient_checkpointing=setting).gradient_checkpointing is value


def test_overlap_waits_for_the_servers(tmp_path: Path) -> None:
    # A job with overlap and without servers is refused; with_servers adds both.
    assert job(tmp_path, overlap=1).overlap == 0
