"""A training run in a child process.

The child dies with its parent; cancelling ``train`` stops it cleanly, then by force. Its log is ``train.log`` in the
job's folder. A ``TrainingError`` of the child is raised again here, any other end raises ``TrainerDied`` with the
last lines of the log; checkpoints survive.
"""

from collections.abc import Callable
from dataclasses import asdict

from traced.core.errors import DiskError, TracedError
from traced.processes.executor import LocalExecutor
from traced.processes.job import Failure, Job, Report, ReportKind, Result
from traced.training import errors
from traced.training.errors import TrainerDied, TrainingError
from traced.training.job import TrainingJob, TrainingResult
from traced.training.metrics import Metrics


async def train(job: TrainingJob, on_metric: Callable[[Metrics], None]) -> TrainingResult:
    """Run the job in a child process; ``on_metric`` is called with each iteration's metrics."""

    def on_report(report: Report) -> None:
        if report.kind is ReportKind.PROGRESS:
            on_metric(report.data["metrics"])

    result = await LocalExecutor(job.out).run(_as_job(job), on_report)
    if result.value is not None:
        return TrainingResult(**result.value)
    if result.failure is not None and TracedError.__name__ in result.failure.types:
        raise _error(result.failure)
    raise _died(job, result)


def _as_job(job: TrainingJob) -> Job:
    threads = {"OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    return Job("traced.training", asdict(job), cycle_id="", stage="train", variables=threads)


def _error(failure: Failure) -> TracedError:
    if failure.type == DiskError.__name__:
        return DiskError(failure.message, hint=failure.hint)
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
