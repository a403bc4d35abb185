"""One way to start, watch and stop a child process.

Invariants: a child has a session of its own (a Ctrl-C in the terminal reaches the parent alone, which then stops it in
order); the pipe on its standard input stays open exactly as long as its parent lives (``traced.executor.parent`` is the
child's side of that); what it prints goes through a pipe into a log of bounded size. Once ``stop`` or ``kill`` has
returned, nothing that the child started is left, whichever session it moved to. Stopping twice is harmless.

A thread that lives as long as this process does the starting, because Linux ties the parent-death signal to the thread
that forked, not to its process (prctl(2), PR_SET_PDEATHSIG).

Fails: ``StartError``. Needs Linux (pidfd_open(2), proc(5)). Not covered: processes in state D, which nothing ends.
"""

import contextlib
import functools
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from traced.executor.errors import StartError
from traced.executor.log import BoundedLog
from traced.executor.tree import MARK, SEPARATOR, end_marked
from traced.host.holder import this_holder
from traced.host.redaction import redacted_lines

LOG_BYTES = 20 * 2**20
CHUNK = 64 * 1024
DRAIN_S = 5.0
ROOT = Path(__file__).parents[2]  # the child imports the same code as its parent, installed or not

_numbers = itertools.count(1)


@dataclass
class Child:
    """A child process and what is needed to watch and end it."""

    popen: "subprocess.Popen[bytes]"
    mark: str
    log: BoundedLog
    pump: threading.Thread
    pidfd: int
    ending: threading.RLock = field(default_factory=threading.RLock)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's and its session's."""
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, or the negative number of the signal that ended it; None until ``stop`` or ``kill`` returned."""
        return self.popen.returncode

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end without reaping; whether it came within ``timeout_s`` seconds (None: wait for ever)."""
        if self.popen.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; harmless when it has gone."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def stop(self, grace_s: float) -> None:
        """End it: asked first, killed with everything it started when it has not gone after ``grace_s`` seconds."""
        with self.ending:
            self.signal(signal.SIGTERM)
            self.wait(grace_s)
            self.kill()

    def kill(self) -> None:
        """End it and everything it started, now; afterwards the log is complete."""
        with self.ending:
            self.kill_group()
            self.popen.wait()  # before anybody else (psutil) waits for it, and takes its exit code away
            end_marked(self.mark)
            self._close()

    def kill_group(self) -> None:
        """Kill its process group, and wait for nothing."""
        if self.popen.returncode is None:  # not reaped yet, so that the number is still this group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _close(self) -> None:
        self.pump.join(DRAIN_S)
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def start(
    command: Sequence[str],
    *,
    log: Path,
    log_bytes: int = LOG_BYTES,
    variables: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
    python: str = sys.executable,
) -> Child:
    """Start ``python COMMAND...`` with its output in ``log``. Raises ``StartError``."""
    mark = f"{this_holder()}#{next(_numbers)}"
    try:
        words, environment = [python, *command], _environment(mark, variables or {})
        popen = _spawner(os.getpid()).submit(_popen, words, environment, pass_fds).result()
    except OSError as error:
        raise StartError(
            f"cannot start {command[:3]}: {error}", hint="free memory or processes; traced doctor"
        ) from error
    assert popen.stdout is not None
    kept = BoundedLog(log, log_bytes)
    pump = threading.Thread(target=_pump, args=(popen.stdout, kept), name=f"log of {popen.pid}", daemon=True)
    pump.start()
    return Child(popen, mark, kept, pump, os.pidfd_open(popen.pid))


def _popen(command: Sequence[str], environment: dict[str, str], pass_fds: Sequence[int]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        pass_fds=pass_fds,
        start_new_session=True,
        env=environment,
    )


def _environment(mark: str, variables: Mapping[str, str]) -> dict[str, str]:
    marks = SEPARATOR.join(filter(None, [os.environ.get(MARK), mark]))
    imports = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": imports, "PYTHONUNBUFFERED": "1", **variables, MARK: marks}


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """The thread that starts the children of process ``pid``; a forked process needs one of its own."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


def _pump(stream: IO[bytes], log: BoundedLog) -> None:
    """Carry the child's output, line by line and without secrets, into its log until all who could write have gone."""
    begun = b""  # a line that has no end yet
    with stream:
        while chunk := os.read(stream.fileno(), CHUNK):
            whole, newline, begun = (begun + chunk).rpartition(b"\n")
            if len(begun) > CHUNK:
                whole, begun = whole + newline + begun, b""
            log.write(redacted_lines(whole + newline))
    log.write(redacted_lines(begun))
    log.close()
