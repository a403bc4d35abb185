"""The child's side of a job: ``sys.exit(run_child(work))`` in a module that is run as ``python -m MODULE JOB.json``.

With ``--report-fd N`` the job is supervised: one JSON object per line goes to that descriptor, with the ``kind``
heartbeat (from a thread), progress, and at the end result or error. Standard output and standard error are the log.
Without the option the same lines go to standard output, for runs by hand. ``run_child`` is the error boundary of a job.

Exit codes: 0 finished, 1 an expected error, 70 a defect (its traceback is in the log), 143 stopped by SIGTERM, Ctrl-C
or the end of the parent.
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

from traced.core.errors import cause_of, is_expected
from traced.core.permissions import private_umask
from traced.core.stop_flag import StopFlag
from traced.processes.job import Job, JsonObject, ReportKind, describe, read_job
from traced.processes.parent import arm_alarm, follow_parent, kill_descendants

EXIT_FAILED, EXIT_DEFECT, EXIT_STOPPED = 1, 70, 143
# Number of heartbeats within the time after which silence counts as hung.
HEARTBEATS_PER_LIMIT = 4
# Heartbeat limits after which the kernel's alarm kills a child that no longer runs Python. The parent's watchdog acts
# after one limit and records where the child hangs, so the alarm is the fallback.
ALARM_LIMITS = 3
# In -1000..1000: when memory runs out the kernel kills a child before the service (proc(5), oom_score_adj).
OOM_SCORE = 500
KIB = 1024

Work = Callable[["Reporter", JsonObject], JsonObject]


class Reporter:
    """Writes report lines to the parent; usable from any thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Reentrant, because a signal that interrupts a write may write a line of its own.
        self._lock = threading.RLock()

    def progress(self, phase: str, done: int = 0, **details: Any) -> None:
        """Report how far the job is; repeating the same phase and counter does not count as progress.

        Args:
            phase: What the job does now.
            done: A counter within the phase; a resumed attempt continues it.
            details: Further JSON values for the progress display.
        """
        self.send(ReportKind.PROGRESS, {"phase": phase, "done": done, **details})

    def send(self, kind: str, data: JsonObject) -> None:
        """Write one report line."""
        # A broken pipe is ignored: the parent is gone, and its end stops this process anyway.
        line = json.dumps({"kind": kind, "data": data}).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(self._descriptor, line) :]


def run_child(work: Work, arguments: Sequence[str] | None = None) -> int:
    """Run the job named on the command line and return the exit code."""
    private_umask()
    options = _options(arguments)
    supervised = options.report_fd is not None
    reporter = Reporter(options.report_fd if supervised else 1)
    _install_signal_handlers()
    try:
        job = read_job(options.job)
        with _supervision(reporter, job) if supervised else contextlib.nullcontext():
            reporter.send("result", work(reporter, job.arguments))
            return 0
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except Exception as error:
        return _report_error(reporter, error)
    finally:
        # The parent kills leftovers too, but may itself be gone by now.
        if supervised:
            kill_descendants()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one job; see traced.processes.child.")
    parser.add_argument("job", type=Path, metavar="JOB.json")
    parser.add_argument("--report-fd", type=int, help="descriptor for the report lines; standard output by default")
    return parser.parse_args(arguments)


def _report_error(reporter: Reporter, raised: Exception) -> int:
    error = cause_of(raised)
    if not is_expected(error):
        traceback.print_exception(raised)
    failure = describe(error)
    data = {"types": failure.types, "message": failure.message, "hint": failure.hint, "errno": failure.errno}
    reporter.send("error", data)
    return EXIT_FAILED if is_expected(error) else EXIT_DEFECT


@contextlib.contextmanager
def _supervision(reporter: Reporter, job: Job) -> Iterator[None]:
    """Follow the parent and send heartbeats while the body runs."""
    follow_parent(job.limits.grace_s)
    _raise_oom_score()
    faulthandler.enable()
    # The watchdog sends SIGUSR1 to a hung child, so that its log says where it hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stop = threading.Event()
    arguments = (reporter, job.limits.heartbeat_s, stop)
    threading.Thread(target=_send_heartbeats, args=arguments, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        stop.set()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _send_heartbeats(reporter: Reporter, limit_s: float, stop: threading.Event) -> None:
    while not stop.is_set():
        arm_alarm(ALARM_LIMITS * limit_s)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        reporter.send(ReportKind.HEARTBEAT, {"peak_rss_bytes": peak})
        stop.wait(limit_s / HEARTBEATS_PER_LIMIT)


def _install_signal_handlers() -> None:
    """Turn the first SIGTERM into a KeyboardInterrupt of the main thread (asyncio.run cancels its main task)."""
    stopping = StopFlag()

    def terminate(number: int, frame: FrameType | None) -> None:
        # Once only: a second interrupt would break off the unwinding that makes checkpoints complete.
        if not stopping.is_set:
            stopping.set()
            signal.raise_signal(signal.SIGINT)

    # A shell that starts a background job has SIGINT ignored, and the child would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)


def _raise_oom_score() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
