"""A distillation learns from its teachers alone."""

from pathlib import Path

import pytest

from sandbox.contract import Score
from tests.integration.training.bandit_jobs import job, train
from tests.unit.training.bandit import Bandit
from traced.training.errors import JobError


class Silent(Bandit):
    """Its rewards are all equal; success is that of the bandit."""

    def score(self) -> Score:
        return Score(0.0, super().score().success)


def test_the_policy_learns_what_its_teacher_can_without_a_reward(model_path: Path, tmp_path: Path) -> None:
    teacher = job(model_path, tmp_path / "teacher", iterations=40)
    teacher_metrics = train(teacher)
    distilled = job(model_path, tmp_path / "student", iterations=40, teachers=[str(teacher.adapter)])
    metrics = train(distilled, Silent)
    # The first iteration is that of the untrained policy; both courses differ a lot between machines.
    untrained = metrics[0]["success"]
    teacher_last, student_last = (sum(row["success"] for row in rows[-10:]) / 10 for rows in (teacher_metrics, metrics))
    assert teacher_last > untrained + 0.1
    assert student_last > untrained + 0.1
    assert metrics[-1]["kl"] < metrics[0]["kl"] / 5
    assert all(row["mixed_groups"] == 0 and row["trajectories_kept"] > 0 for row in metrics)


def test_other_teachers_are_another_job(model_path: Path, tmp_path: Path) -> None:
    teachers = [job(model_path, tmp_path / str(seed), iterations=1, seed=seed) for seed in (0, 1)]
    for teacher in teachers:
        train(teacher)
    without_teacher = job(model_path, tmp_path / "out", iterations=1)
    of_first, of_second = (
        job(model_path, tmp_path / "out", iterations=1, teachers=[str(teacher.adapter)]) for teacher in teachers
    )
    assert len({without_teacher.fingerprint(), of_first.fingerprint(), of_second.fingerprint()}) == 3
    with pytest.raises(JobError, match="kl is set, and the job has teachers"):
        job(model_path, tmp_path / "out", kl=0.1, teachers=["x"])
