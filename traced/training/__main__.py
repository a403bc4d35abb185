"""``python -m traced.training JOB.json``: one training run in a process of its own (see ``traced.processes.child``).

The job's arguments are the fields of a ``TrainingJob``; every iteration is a progress line with its metrics, and the
value is a ``TrainingResult``. A stop closes the sandbox and leaves the checkpoints.
"""

import os
import sys
from dataclasses import asdict
from typing import Any

from traced.inference.model_files import resolve_model
from traced.processes.child import Reporter, run_child
from traced.training.job import job_from, open_source
from traced.training.metrics import Metrics


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run the training job."""
    # TRL warns that ``rollout_func`` may change; its version is pinned.
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    job = job_from(arguments, "the job")
    resolve_model(job.model_path, job.out)
    source = open_source(job)
    # Imported here because it takes seconds: a job that cannot run fails before.
    from traced.training.grpo import train

    def report_metrics(metrics: Metrics) -> None:
        reporter.progress("iteration", int(metrics["iteration"]), metrics=metrics)

    return asdict(train(job, report_metrics, lambda _: source))


if __name__ == "__main__":
    sys.exit(run_child(work))
