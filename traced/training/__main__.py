"""``python -m traced.training JOB.json``: one training run as a process of its own.

Standard output carries one JSON object per line and nothing else: ``{"metric": ...}`` per iteration, then
``{"result": ...}`` or ``{"error": {"type", "message", "hint"}}``; whatever libraries print goes to standard error.
SIGTERM, Ctrl-C and, with ``--supervised``, the end of standard input (the parent died) unwind the run: the sandbox
closes, checkpoints stay.
Exit codes: 0 finished, 1 a ``TracedError``, 143 stopped, anything else a crash with its traceback on standard error.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from traced.errors import TracedError
from traced.models import resolve_model
from traced.training.job import read_job
from traced.training.sources import open_source

STOPPED = 143


def main(arguments: list[str]) -> int:
    """Run the job named by the first argument."""
    out = _claim_stdout()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))
    if "--supervised" in arguments[1:]:
        threading.Thread(target=_stop_with_parent, daemon=True).start()
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # we use rollout_func knowing that it may change
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        job = read_job(Path(arguments[0]))
        resolve_model(job.model_path, job.out)
        source = open_source(job)
        from traced.training.grpo import train  # takes seconds; a job that cannot run is told before

        _send(out, "result", asdict(train(job, lambda metrics: _send(out, "metric", metrics), lambda _: source)))
    except TracedError as error:
        _send(out, "error", {"type": type(error).__name__, "message": error.message, "hint": error.hint})
        return 1
    except KeyboardInterrupt:
        return STOPPED
    return 0


def _claim_stdout() -> TextIO:
    """Keep standard output for our own lines; everything else that prints ends up on standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _send(out: TextIO, kind: str, value: dict[str, Any]) -> None:
    out.write(json.dumps({kind: value}) + "\n")
    out.flush()


def _stop_with_parent() -> None:
    """Wait for the end of standard input, which the parent holds open while it lives, then ask for a clean stop."""
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
