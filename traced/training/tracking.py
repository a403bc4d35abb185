"""Experiment trackers of a training run: TensorBoard, Weights & Biases and MLflow, through transformers' integrations.

A tracker gets the metrics of every iteration, the run's id as name, and the ids of the chain that led to the run as
tags. Its files are in the job's folder unless the tracker's own variables say otherwise (``WANDB_MODE``, ``WANDB_DIR``,
``MLFLOW_TRACKING_URI`` ...). Nothing is sent anywhere by default.
"""

import contextlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from traced.training.errors import JobError
from traced.training.job import TrainingJob

PROJECT = "traced"
log = logging.getLogger(__name__)
# MLflow itself needs pandas below version 3; this package has what a training reports with.
PACKAGES = {"mlflow": "mlflow-skinny"}
TENSORBOARD = "tensorboard"
# W&B refuses longer tags and ends the run; the beginning of an environment's hash identifies it.
WANDB_TAG_LENGTH = 64


def check_trackers(job: TrainingJob) -> None:
    """Raise ``JobError`` if the library of a tracker is not installed."""
    missing = [name for name in job.report_to if importlib.util.find_spec(name) is None]
    if missing:
        raise JobError(
            f"report_to is {missing[0]!r}, and this library is not installed",
            hint=f"pip install {PACKAGES.get(missing[0], missing[0])}",
        )


def tracking_variables(job: TrainingJob) -> dict[str, str]:
    """Return the environment variables with which the trackers name, tag and store this run."""
    wandb = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(job.out),
        "WANDB_PROJECT": PROJECT,
        "WANDB_TAGS": ",".join(f"{name}:{value}"[:WANDB_TAG_LENGTH] for name, value in sorted(job.tags.items())),
    }
    mlflow = {
        "MLFLOW_TRACKING_URI": f"sqlite:///{job.out.resolve() / 'mlflow.db'}",
        "MLFLOW_EXPERIMENT_NAME": PROJECT,
        "MLFLOW_TAGS": json.dumps(job.tags, sort_keys=True),
    }
    return (wandb if "wandb" in job.report_to else {}) | (mlflow if "mlflow" in job.report_to else {})


def set_variables(job: TrainingJob) -> None:
    """Set the variables of the job's trackers; what the user has set stays."""
    for name, value in tracking_variables(job).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def trackers(job: TrainingJob) -> Iterator[list[Any]]:
    """Yield the callbacks of the job's trackers, in the process that reports; complete their files after the block."""
    try:
        yield _callbacks(job)
    except BaseException:
        _end_runs(job, has_failed=True)
        raise
    _end_runs(job, has_failed=False)


def _end_runs(job: TrainingJob, *, has_failed: bool) -> None:
    try:
        if "wandb" in job.report_to:
            import wandb

            # W&B writes in a process of its own, which would end with this one before it has written everything.
            if wandb.run is not None:
                wandb.finish(exit_code=int(has_failed))
        if "mlflow" in job.report_to:
            import mlflow

            mlflow.end_run("FAILED" if has_failed else "FINISHED")
    except Exception:
        # The libraries raise what they like, and neither an adapter nor the training's own error may be lost by that.
        log.exception("the run of a tracker in %s could not be closed", job.out)


def _callbacks(job: TrainingJob) -> list[Any]:
    if not job.report_to:
        return []
    set_variables(job)
    # Imported here because transformers looks for every tracker's library on import.
    from transformers.integrations import MLflowCallback, TensorBoardCallback, WandbCallback

    integrations = {"wandb": WandbCallback, "mlflow": MLflowCallback}
    callbacks = [integrations[name]() for name in job.report_to if name in integrations]
    if TENSORBOARD in job.report_to:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(os.environ.get("TENSORBOARD_LOGGING_DIR", str(job.out / TENSORBOARD / job.run_id)))
        writer.add_text("tags", json.dumps({"run": job.run_id, **job.tags}, sort_keys=True))
        callbacks.append(TensorBoardCallback(writer))
    return callbacks
