"""A training can begin with the weights of an adapter."""

from pathlib import Path

import pytest

from tests.integration.training.bandit_jobs import job, train
from traced.training.errors import JobError


def test_a_training_goes_on_where_the_adapter_is(model_path: Path, tmp_path: Path) -> None:
    first = job(model_path, tmp_path / "first", iterations=40)
    first_metrics = train(first)
    fresh = job(model_path, tmp_path / "fresh", iterations=1)
    warm = job(model_path, tmp_path / "warm", iterations=10, start=str(first.adapter))
    warm_metrics = train(warm)
    learned = sum(row["success"] for row in first_metrics[-10:]) / 10
    warm_success = sum(row["success"] for row in warm_metrics) / 10
    assert learned > first_metrics[0]["success"] + 0.1
    assert warm_success > first_metrics[0]["success"] + 0.1
    # The first iteration is played by the adapter, not by the base.
    assert warm_metrics[0]["drift_adapter"] < 0.01 < warm_metrics[0]["drift_base"]
    assert len({fresh.fingerprint(), warm.fingerprint()}) == 2


def test_an_adapter_of_another_rank_is_refused(model_path: Path, tmp_path: Path) -> None:
    first = job(model_path, tmp_path / "first", iterations=1)
    train(first)
    with pytest.raises(JobError, match="other layers or another rank"):
        train(job(model_path, tmp_path / "out", iterations=1, lora_r=first.lora_r * 2, start=str(first.adapter)))
