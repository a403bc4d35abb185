"""The child's side of a job: ``sys.exit(run_child(work))`` in a module that is run as ``python -m MODULE JOB.json``.

With ``--report-fd N`` the job is supervised: one JSON object per line goes to that descriptor, ``{"kind": ...}`` of
heartbeat (from a thread), progress, and at the end result or error. Standard output and standard error are the log.
Without it (by hand) the same lines go to standard output, and nothing watches.

SIGTERM, Ctrl-C and the end of the parent raise KeyboardInterrupt in the main thread (and cancel the main task of
``asyncio.run``), so that ``work`` unwinds and its checkpoints are whole; asked a second time it goes on unwinding.
A child that does not even run Python for three heartbeat times is ended by the kernel's alarm, parent or not.

Exit codes: 0 finished, 1 an error raised on purpose, 70 a defect (its traceback is in the log), 143 stopped.
``run_child`` is the boundary: every exception becomes an error line here and nowhere else.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from traced.core.errors import cause_of, is_known
from traced.processes.job import Job, ReportKind, describe, read_job
from traced.processes.parent import arm, follow_parent, last_act

FAILED, DEFECT, STOPPED = 1, 70, 143
BEATS = 4  # heartbeats in the time after which silence counts as hung
ALARM = 3  # heartbeat times after which the kernel ends a child; the parent's watchdog comes first, and says where
OOM_SCORE = 500  # of -1000..1000: short of memory, the kernel ends a child before the service (proc(5), oom_score_adj)
KIB = 1024

Work = Callable[["Reporter", dict[str, Any]], dict[str, Any]]


class Reporter:
    """Tells the parent what happens; usable from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.RLock()  # a stop that comes while a line is written may write one itself

    def progress(self, phase: str, done: int = 0, **more: Any) -> None:
        """``done`` (a counter that an attempt which resumes takes up where it was) in ``phase``; ``more`` is JSON.

        The same phase and counter again is no progress to the watchdog.
        """
        self.send(ReportKind.PROGRESS, {"phase": phase, "done": done, **more})

    def send(self, kind: str, data: dict[str, Any]) -> None:
        """Write one line; silently nothing when the parent is gone, whose end stops this process anyway."""
        line = json.dumps({"kind": kind, "data": data}).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._descriptor, line) :]


def run_child(work: Work, arguments: Sequence[str] | None = None) -> int:
    """Do the job named on the command line; returns the exit code."""
    options = _options(arguments)
    supervised = options.report_fd is not None
    reporter = Reporter(options.report_fd if supervised else 1)
    _listen_to_signals()
    try:
        job = read_job(options.job)
        with _watched(reporter, job) if supervised else contextlib.nullcontext():
            reporter.send("result", work(reporter, job.arguments))
            return 0
    except KeyboardInterrupt:
        return STOPPED
    except Exception as error:  # the boundary: whatever a job raises is told once, in one line
        return _failed(reporter, error)
    finally:
        if supervised:
            last_act()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one job; see traced.processes.child.")
    parser.add_argument("job", type=Path, metavar="JOB.json")
    parser.add_argument("--report-fd", type=int, help="descriptor for the report lines; standard output by default")
    return parser.parse_args(arguments)


def _failed(reporter: Reporter, raised: Exception) -> int:
    error = cause_of(raised)
    if not is_known(error):
        traceback.print_exception(raised)
    failure = describe(error)
    data = {"types": failure.types, "message": failure.message, "hint": failure.hint, "errno": failure.errno}
    reporter.send("error", data)
    return FAILED if is_known(error) else DEFECT


@contextlib.contextmanager
def _watched(reporter: Reporter, job: Job) -> Iterator[None]:
    """Follow the parent and beat, as long as the body runs."""
    follow_parent(job.limits.grace_s)
    _come_first_when_memory_is_short()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks where a stuck child is
    over = threading.Event()
    beat = threading.Thread(target=_beat, args=(reporter, job.limits.heartbeat_s, over), name="heartbeat", daemon=True)
    beat.start()
    try:
        yield
    finally:
        over.set()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _beat(reporter: Reporter, silence_s: float, over: threading.Event) -> None:
    while not over.is_set():
        arm(ALARM * silence_s)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        reporter.send(ReportKind.HEARTBEAT, {"peak_rss_bytes": peak})
        over.wait(silence_s / BEATS)


def _listen_to_signals() -> None:
    """Handle SIGTERM as SIGINT, and SIGINT as Python does by default even where a shell had it ignored."""
    asked = threading.Event()

    def terminate(number: int, frame: FrameType | None) -> None:
        if not asked.is_set():
            asked.set()
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)


def _come_first_when_memory_is_short() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
