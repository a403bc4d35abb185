"""Rollouts that are sampled with a hint and trained on without it."""

from pathlib import Path

import pytest
import torch

from tests.integration.training.bandit_jobs import job, train
from tests.unit.training.tiny import save_model
from traced.training.policy_check import select_rows
from traced.training.trainer import GroupRelativeTrainer

HINT = "please say abc 1 2 3"


def test_the_ratio_of_a_hinted_row_is_one_and_the_policy_check_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training_job = job(save_model(tmp_path / "model"), tmp_path / "out", iterations=3, hint=HINT, hint_share=0.5)
    distances: list[tuple[float, float]] = []
    compute, logprobs = GroupRelativeTrainer._compute_loss, GroupRelativeTrainer._logprobs

    def compare_logprobs(trainer: GroupRelativeTrainer, model: object, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            gap = (logprobs(trainer, model, inputs)[0] - inputs["old_per_token_logps"]).abs()
        is_hinted = inputs["is_off_policy"]
        distances.append((float(gap[is_hinted].max()), float(gap[~is_hinted].max())))
        return compute(trainer, model, inputs)

    monkeypatch.setattr(GroupRelativeTrainer, "_compute_loss", compare_logprobs)
    for metrics in train(training_job):
        assert metrics["trajectories_kept"] > 0
        # On-policy: with the engine's log-probs of the hinted rows neither would hold.
        assert abs(metrics["loss"]) < 1e-4
        assert metrics["clip_fraction"] == 0.0
        assert metrics["drift_p99"] < 1e-3
        assert 0 <= metrics["hinted_success"] <= 1
    hinted, free = zip(*distances, strict=True)
    assert min(hinted) > 0.1
    assert max(free) < 1e-3


def test_hinted_rows_are_not_measured() -> None:
    mask = torch.ones(3, 2, dtype=torch.long)
    batch = {name: mask for name in ("prompt_mask", "completion_mask", "tool_mask")}
    batch |= {"prompt_ids": torch.arange(6).view(3, 2), "is_off_policy": torch.tensor([True, False, True])}
    measured_rows = select_rows(batch, [["a", "a"], ["b", "b"], ["c", "c"]], policy=0, tokens=1000)
    assert measured_rows.engines == ["b"]
    assert measured_rows.rows["prompt_ids"].tolist() == [[2, 3]]
