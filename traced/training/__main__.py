"""``python -m traced.training JOB.json``: one training run as a process of its own (see ``traced.processes.child``).

The job's arguments are the fields of a ``TrainingJob``; every iteration is a progress line that carries its metrics,
and the result is a ``TrainingResult``. A stop unwinds the run: the sandbox closes, checkpoints stay.
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
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we use rollout_func knowing that it may change
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    job = job_from(arguments, "the job")
    resolve_model(job.model_path, job.out)
    source = open_source(job)
    from traced.training.grpo import train  # takes seconds; a job that cannot run is told before

    def tell(metrics: Metrics) -> None:
        reporter.progress("iteration", int(metrics["iteration"]), metrics=metrics)

    return asdict(train(job, tell, lambda _: source))


if __name__ == "__main__":
    sys.exit(run_child(work))
