"""A training run in a child process: started, watched, stopped.

Invariants: the child dies with its parent (it watches a pipe that the parent holds open); cancelling ``train`` stops it
cleanly, then by force after ``GRACE_S``; the child has a session of its own, so Ctrl-C reaches it through the parent.
How it fails: the child's own ``TrainingError`` is raised again here; a child that ends without a word raises
``TrainerDied`` with the last lines of its log. Checkpoints survive all of it: the same call carries on.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

from traced.training import errors
from traced.training.errors import TrainerDied, TrainingError
from traced.training.job import TrainingJob, TrainingResult
from traced.training.metrics import Metrics
from traced.training.publish import publish_file

GRACE_S = 15.0
LAST_LINES = 12


async def train(job: TrainingJob, on_metric: Callable[[Metrics], None]) -> TrainingResult:
    """Run the job in a child process; ``on_metric`` sees each iteration's metrics as it ends."""
    request = publish_file(job.out / "request.json", job.to_json())
    log = job.out / "train.log"
    with log.open("ab") as stderr:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "traced.training", str(request), "--supervised"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"},
        )
    try:
        result = await _listen(process, on_metric)
        code = await process.wait()
    finally:
        await _stop(process)
    if result is None:
        raise TrainerDied(
            f"the training process of {job.run_id!r} ended with code {code} and no result; "
            f"{log} ends with:\n{_tail(log)}",
            hint="run the same command again: it carries on from the last checkpoint",
        )
    return result


async def _listen(process: Process, on_metric: Callable[[Metrics], None]) -> TrainingResult | None:
    """Pass metrics on until the child closes its output; its result, or its error raised."""
    assert process.stdout is not None
    result = None
    async for line in process.stdout:
        [(kind, value)] = json.loads(line).items()
        if kind == "metric":
            on_metric(value)
        elif kind == "result":
            result = TrainingResult(**value)
        else:
            raise _error(value)
    return result


async def _stop(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), GRACE_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _error(value: dict[str, str]) -> TrainingError:
    kind = getattr(errors, value["type"], TrainingError)
    error: TrainingError = kind(value["message"], hint=value["hint"])
    return error


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:])
