"""Run a training job in a child process: ``train`` starts ``python -m traced.training.process JOB.json``.

The job's arguments are the fields of a ``TrainingJob``; every iteration is a progress line with its metrics, and the
value is a ``TrainingResult``. The child dies with its parent; cancelling ``train`` stops it cleanly, then by force,
and leaves the checkpoints. Its log is ``train.log`` in the job's folder. A ``TrainingError`` of the child, or an error
of its episodes' user (``USER_ERRORS``), is raised again here; any other end raises ``TrainerDied`` with the last lines
of the log. Engines that the child has put to sleep are woken up, whatever its end.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from traced.core.errors import DiskError, TracedError
from traced.core.imports import quick_imports
from traced.inference.errors import EngineError
from traced.inference.model_files import resolve_model
from traced.processes.child import Reporter, run_child
from traced.processes.executor import LocalExecutor
from traced.processes.job import Failure, Job, Report, ReportKind, Result
from traced.processes.parent import follow_parent
from traced.targets.errors import SimulatorError, UserUnavailable
from traced.training import errors
from traced.training.errors import EngineLost, TrainerDied, TrainingError
from traced.training.job import Trainer, TrainingJob, TrainingResult, job_from, open_source, read_job
from traced.training.metrics import Metrics
from traced.training.processes import leave_group

MODULE = "traced.training.process"
# Seconds in which the engines of a trainer that has failed have to be awake; a stop of the service waits for it.
WAKE_S = 30.0
# Of the user in the episodes: the stage is run again.
USER_ERRORS: dict[str, type[TracedError]] = {kind.__name__: kind for kind in (SimulatorError, UserUnavailable)}
log = logging.getLogger(__name__)


async def train(
    job: TrainingJob, on_metric: Callable[[Metrics], None], variables: Mapping[str, str] | None = None
) -> TrainingResult:
    """Run the job in a child process; ``on_metric`` is called with each iteration's metrics.

    Args:
        variables: Environment variables of that process, such as ``CUDA_VISIBLE_DEVICES``.
    """
    try:
        return await _run(job, on_metric, variables or {})
    except (Exception, asyncio.CancelledError):
        if job.engine_sleeps:
            await _wake_engines(job)
        raise


async def _wake_engines(job: TrainingJob) -> None:
    """Wake up the engines of a trainer that has ended during an update."""
    # Imported here because the service has trainings but no engine.
    from traced.inference.engine_sleep import EngineSleep
    from traced.training.policy_engine import engine_clients

    clients = engine_clients(job)
    try:
        await EngineSleep(clients, timeout_s=WAKE_S).end_update()
    except EngineError as error:
        # The trainer's own error counts.
        log.warning("after the training %s: %s", job.run_id, error)
    finally:
        for client in clients:
            await client.aclose()


async def _run(job: TrainingJob, on_metric: Callable[[Metrics], None], variables: Mapping[str, str]) -> TrainingResult:
    def on_report(report: Report) -> None:
        if report.kind is ReportKind.PROGRESS:
            on_metric(report.data["metrics"])

    result = await LocalExecutor(job.out).run(_as_job(job, variables), on_report)
    if result.value is not None:
        return TrainingResult(**result.value)
    if result.failure is not None and TracedError.__name__ in result.failure.types:
        raise error_of(result.failure)
    raise _died(job, result)


def _as_job(job: TrainingJob, device_variables: Mapping[str, str]) -> Job:
    variables = {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    if job.device == "cuda" and job.processes == 1:
        # With more cards in sight transformers would split every batch over them within this one process.
        variables["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return Job(MODULE, asdict(job), cycle_id="", stage="train", variables=variables | dict(device_variables))


def error_of(failure: Failure) -> TracedError:
    """Return the error of the trainer's process as it is raised here."""
    if failure.type == DiskError.__name__:
        return DiskError(failure.message, hint=failure.hint)
    if EngineError.__name__ in failure.types:
        return EngineLost(failure.message, hint=failure.hint)
    if failure.type in USER_ERRORS:
        return USER_ERRORS[failure.type](failure.message, hint=failure.hint)
    kind = getattr(errors, failure.type, TrainingError)
    error: TrainingError = kind(failure.message, hint=failure.hint)
    return error


def _died(job: TrainingJob, result: Result) -> TrainerDied:
    evidence = result.evidence
    last = "\n".join(evidence.last_lines)
    return TrainerDied(
        f"the training process of {job.run_id!r} ended: {evidence.detail}; {evidence.log} ends with:\n{last}",
        hint="run the same command again: it continues from the last checkpoint",
    )


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the training job."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    job = job_from(arguments, "the job")
    resolve_model(job.model_path, job.out)
    source = open_source(job)
    # Imported here because the import takes seconds: a job that cannot run fails before it.
    with quick_imports("sklearn"):
        from traced.training import grpo

    trainer: Trainer = grpo.train

    def report_metrics(metrics: Metrics) -> None:
        reporter.progress("iteration", int(metrics["iteration"]), metrics=metrics)

    return asdict(trainer(job, report_metrics, lambda _: source))


def follow() -> int:
    """Run as one of the other processes of a job with several (``traced.training.processes``); returns 0."""
    follow_parent(0)
    with quick_imports("sklearn"):
        from traced.training import grpo

    grpo.follow(read_job(Path(sys.argv[1])))
    leave_group()
    return 0


if __name__ == "__main__":
    sys.exit(follow() if "RANK" in os.environ else run_child(work))
