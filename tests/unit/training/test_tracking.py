import importlib.util
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from traced.inference.model_files import BUNDLED
from traced.training import grpo, tracking
from traced.training.errors import JobError
from traced.training.footprint import MetaModel
from traced.training.job import TrainingJob
from traced.training.process import _as_job
from traced.training.tracking import check_trackers, set_variables, trackers, tracking_variables


def job(out: Path, **changes: Any) -> TrainingJob:
    return TrainingJob(
        "c1/dates/abc", "dates", {"target": "desk"}, **{"model_path": "model", "out_dir": str(out), **changes}
    )


def test_a_run_is_named_tagged_and_stored_beside_its_job_and_sent_nowhere(tmp_path: Path) -> None:
    variables = tracking_variables(job(tmp_path, report_to=["wandb", "mlflow"], tags={"cycle": "c1", "run": "r"}))
    assert variables["WANDB_MODE"] == "offline"
    assert variables["WANDB_DIR"] == str(tmp_path)
    assert variables["WANDB_TAGS"] == "cycle:c1,run:r"
    assert json.loads(variables["MLFLOW_TAGS"]) == {"cycle": "c1", "run": "r"}
    assert variables["MLFLOW_TRACKING_URI"] == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_tag_has_at_most_the_length_that_wandb_accepts(tmp_path: Path) -> None:
    run = job(tmp_path, report_to=["wandb"], tags={"environment": "0123456789abcdef" * 4, "cycle": "c1"})
    tags = tracking_variables(run)["WANDB_TAGS"].split(",")
    assert [tag.partition(":")[0] for tag in tags] == ["cycle", "environment"]
    assert all(0 < len(tag) <= 64 for tag in tags)
    assert tags[1].startswith("environment:0123456789abcdef")


def test_what_a_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job(tmp_path, report_to=["wandb"])
    for name in tracking_variables(run):
        monkeypatch.setenv(name, "mine")
    set_variables(run)
    assert {os.environ[name] for name in tracking_variables(run)} == {"mine"}


def test_without_trackers_nothing_is_set(tmp_path: Path) -> None:
    assert tracking_variables(job(tmp_path)) == {}
    with trackers(job(tmp_path)) as callbacks:
        assert callbacks == []


class BrokenTracker(ModuleType):
    """As the wandb module with an open run that cannot be closed."""

    run = object()

    def finish(self, exit_code: int) -> None:
        raise RuntimeError(f"no disk, {exit_code}")


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_tracker_that_fails_at_the_end_replaces_neither_a_result_nor_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_failed: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", BrokenTracker("wandb"))
    monkeypatch.setattr(tracking, "_callbacks", lambda job: [])
    with pytest.raises(KeyError) if has_failed else nullcontext(), trackers(job(tmp_path, report_to=["wandb"])):
        if has_failed:
            raise KeyError
    assert f"no disk, {int(has_failed)}" in caplog.text


def test_a_tracker_without_its_library_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"report_to is 'mlflow'.*pip install mlflow-skinny"):
        check_trackers(job(tmp_path, report_to=["mlflow"]))
    check_trackers(job(tmp_path))


def test_a_job_for_a_gpu_that_is_not_there_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(JobError, match=r"devices\.train_on"):
        grpo.check_device(job(tmp_path, device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    grpo.check_device(job(tmp_path, device="cuda"))
    with pytest.raises(JobError, match="2 processes, one per GPU, and sees 1 GPUs"):
        grpo.check_device(job(tmp_path, device="cuda", processes=2))


def test_a_split_base_needs_an_engine_of_its_own_and_layers_to_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"processes": 2, "shard": True, "model_path": str(BUNDLED)}
    with pytest.raises(JobError, match=r'engine\.backend = "vllm"'):
        grpo.check_device(job(tmp_path, **changes))
    changes["engine_urls"] = ["http://127.0.0.1:9"]
    grpo.check_device(job(tmp_path, **changes))
    monkeypatch.setattr(MetaModel, "can_be_split", False)
    with pytest.raises(JobError, match=r"cannot split the layers.*training\.shard = false"):
        grpo.check_device(job(tmp_path, **changes))


def test_an_attention_kernel_that_is_not_installed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="pip install flash-attn"):
        grpo.check_device(job(tmp_path, attention="flash_attention_2"))


def test_a_single_process_sees_a_single_gpu_of_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert _as_job(job(tmp_path, device="cuda"), {}).variables["CUDA_VISIBLE_DEVICES"] == "2"
    assert "CUDA_VISIBLE_DEVICES" not in _as_job(job(tmp_path, device="cuda", processes=2), {}).variables
    assert "CUDA_VISIBLE_DEVICES" not in _as_job(job(tmp_path), {}).variables
