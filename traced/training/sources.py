"""Where a job's episodes come from: a synthetic environment in its container, or a target in this process.

Invariant: a synthetic environment is read as text and runs in the sandbox; it is never imported here.
"""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, cast

from traced.training.errors import JobError
from traced.training.job import TrainingJob


def open_source(job: TrainingJob) -> AbstractAsyncContextManager[Any]:
    """An asynchronous context manager that gives the job's ``EpisodeSource``; ``JobError`` for an unknown target."""
    if "environment" in job.environment_source:
        from sandbox.client import SandboxSource
        from sandbox.policy import SandboxLimits

        source_code = Path(job.environment_source["environment"]).read_text(encoding="utf-8")
        limits = SandboxLimits(**cast(dict[str, Any], job.limits))
        return SandboxSource(source_code, limits=limits, owner=job.owner)
    from traced.targets.registry import target

    chosen = target(job.environment_source["target"])
    split = job.environment_source.get("split", "train")
    if split not in chosen.splits:
        raise JobError(f"target {chosen.name!r} has no split {split!r}; it has {', '.join(chosen.splits)}")
    seeds = chosen.splits[split]
    if not (seeds.start <= job.seed_low and job.seed_high <= seeds.stop):
        raise JobError(f"seeds [{job.seed_low}, {job.seed_high}) leave {chosen.name}'s split {split!r} ({seeds})")
    return chosen.source()
