"""Start, watch and stop a child process, with its output in a log of bounded size.

Invariants: a child leads its own session, so that a Ctrl-C in the terminal reaches the parent alone; its standard input
stays open exactly as long as the parent lives (``traced.processes.parent`` is the child's side). After ``Child.stop``
or ``Child.kill``, both idempotent, no process that the child started is left. Errors: ``StartError``. Needs Linux
(pidfd_open(2), proc(5)). Not covered: processes in state D; two writers of one log path.
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Protocol

from traced.core.errors import TracedError
from traced.core.ownership import own_identity
from traced.core.redaction import redacted_lines
from traced.processes.job import StartError
from traced.processes.process_tree import MARK_SEPARATOR, MARK_VARIABLE, kill_marked

LOG_BYTES = 20 * 2**20
# How much of the log's end is also held in memory, for error reports when the disk refuses writes.
TAIL_BYTES = 16 * 1024
CHUNK_BYTES = 64 * 1024
DRAIN_S = 5.0
# The child imports the same code as its parent, installed or not.
ROOT = Path(__file__).parents[2]
POLL_S = 0.2
# Exponential back-off between restarts, reset after RESET_UPTIME_S seconds of uptime, start-up excluded.
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
RESET_UPTIME_S = 60.0

_child_numbers = itertools.count(1)
log = logging.getLogger(__name__)


class BoundedLog:
    """A log file of at most ``limit`` bytes together with its predecessor ``path.1``.

    A disk that refuses writes (full, read-only) never blocks the writer: the text is dropped, except its last lines.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self._half = max(limit // 2, 1)
        self._file: FileIO | None = None
        self._size = 0
        self._end = b""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
            self._end = self._read_end()
        except OSError:
            self._drop()

    def write(self, text: bytes) -> None:
        """Append ``text``; disk errors are swallowed."""
        self._end = (self._end + text)[-TAIL_BYTES:]
        # Of a text larger than the whole log only the end would remain after the rotations.
        rest = text[-2 * self._half :]
        try:
            while rest:
                if self._size >= self._half:
                    self._rotate()
                rest = self._append(rest)
        except OSError:
            self._drop()

    def last_lines(self, count: int) -> list[str]:
        """Return the last ``count`` lines."""
        return self._end.decode(errors="replace").splitlines()[-count:]

    def close(self) -> None:
        """Close the file; the last lines stay readable."""
        self._drop()

    def _open(self) -> None:
        self._file = FileIO(self.path, "ab")
        self._size = self._file.tell()

    def _append(self, text: bytes) -> bytes:
        """Write what fits into the current half and return the rest."""
        if self._file is None:
            self._open()
        assert self._file is not None
        count = self._file.write(text[: self._half - self._size]) if self._size < self._half else 0
        self._size += count
        return text[count:]

    def _rotate(self) -> None:
        self._drop()
        os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
        self._open()

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_end(self) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(max(self._size - TAIL_BYTES, 0))
            return stream.read(TAIL_BYTES)


@dataclass
class Child:
    """A running child process with its log and the handles to watch and stop it."""

    popen: "subprocess.Popen[bytes]"
    mark: str
    log: BoundedLog
    pump: threading.Thread
    pidfd: int
    stop_lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def pid(self) -> int:
        """Return the process id, which is also the id of the process group and of the session."""
        return self.popen.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the child.

        It is None until ``Child.stop`` or ``Child.kill`` has returned.
        """
        return self.popen.returncode

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the exit without reaping; returns whether it came within ``timeout_s`` seconds (None: no limit)."""
        if self.popen.returncode is not None:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; does nothing after its exit."""
        if self.popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, number)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait up to ``grace_s`` seconds, then kill the child and its descendants."""
        with self.stop_lock:
            self.signal(signal.SIGTERM)
            self.wait(grace_s)
            self.kill()

    def kill(self) -> None:
        """Kill the child and its descendants now; the log is complete afterwards."""
        with self.stop_lock:
            self.kill_group()
            # Reap here: if psutil waited for the process first, its exit code would be lost.
            self.popen.wait()
            kill_marked(self.mark)
            self._close()

    def kill_group(self) -> None:
        """Kill the process group without waiting."""
        # Before the child is reaped its number cannot belong to another process group.
        if self.popen.returncode is None:
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
    """Start ``python COMMAND...`` with its output in ``log``.

    Raises:
        StartError: the operating system refused to create the process.
    """
    mark = f"{own_identity()}#{next(_child_numbers)}"
    try:
        argv, environment = [python, *command], _environment(mark, variables or {})
        popen = _spawner(os.getpid()).submit(_popen, argv, environment, pass_fds).result()
    except OSError as error:
        raise StartError(
            f"cannot start {command[:3]}: {error}", hint="free memory or processes, then run: traced doctor"
        ) from error
    assert popen.stdout is not None
    bounded_log = BoundedLog(log, log_bytes)
    pump = threading.Thread(target=_pump, args=(popen.stdout, bounded_log), name=f"log of {popen.pid}", daemon=True)
    pump.start()
    return Child(popen, mark, bounded_log, pump, os.pidfd_open(popen.pid))


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
    marks = MARK_SEPARATOR.join(filter(None, [os.environ.get(MARK_VARIABLE), mark]))
    imports = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # By default the threads of GNU's OpenMP spin for milliseconds while they wait for each other. Beside other load, a
    # thread that spins holds the core that the awaited thread needs: the embedded engine was 30 times slower. On a
    # quiet machine, spinning briefly costs a tenth, not spinning at all a third.
    waits = {} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": "1000"}
    own_variables = {"PYTHONPATH": imports, "PYTHONUNBUFFERED": "1", **variables, MARK_VARIABLE: marks}
    return {**waits, **os.environ, **own_variables}


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """Return the thread that starts all children of process ``pid``."""
    # Linux ties the parent-death signal to the thread that forked, not to its process (prctl(2), PR_SET_PDEATHSIG):
    # a short-lived thread would kill its child when it ends. A forked process has no threads and needs its own.
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")


def _pump(stream: IO[bytes], log: BoundedLog) -> None:
    """Copy the child's output into its log, redacted, until every process that holds the pipe has exited."""
    partial_line = b""
    with stream:
        while chunk := os.read(stream.fileno(), CHUNK_BYTES):
            # Redaction works on whole lines: a secret must not be split over two writes.
            lines, newline, partial_line = (partial_line + chunk).rpartition(b"\n")
            if len(partial_line) > CHUNK_BYTES:
                lines, partial_line = lines + newline + partial_line, b""
            log.write(redacted_lines(lines + newline))
    log.write(redacted_lines(partial_line))
    log.close()


class RunningProcess(Protocol):
    """A process that can be observed and stopped."""

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        ...

    def stop(self) -> None:
        """Stop the process and wait for its end."""
        ...


class RestartingProcess:
    """A process that is started again whenever it exits; a hung process is not detected.

    Args:
        name: The name of the process in log messages.
        start: Starts the process and returns when it is ready.
    """

    def __init__(self, name: str, start: Callable[[], RunningProcess]) -> None:
        self._name, self._start = name, start
        self._process: RunningProcess | None = None
        self._stopped = False

    async def start(self) -> None:
        """Start the process; errors of the start function are raised."""
        await asyncio.to_thread(self._start_process)

    async def supervise(self) -> None:
        """Restart the process whenever it exits, until cancelled."""
        failures = 0
        ready_at: float | None = time.monotonic()
        while True:
            await asyncio.sleep(POLL_S)
            if self._process is not None and self._process.alive:
                continue
            if ready_at is not None and time.monotonic() - ready_at > RESET_UPTIME_S:
                failures = 0
            pause_s = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            log.warning("%s ended; restarting in %.0f s", self._name, pause_s)
            await asyncio.sleep(pause_s)
            failures, ready_at = failures + 1, None
            try:
                await asyncio.to_thread(self._stop_process)
                await self.start()
                ready_at = time.monotonic()
            except (TracedError, OSError) as error:
                log.warning("%s cannot be started: %s", self._name, error)

    def stop(self) -> None:
        """Stop the process for good."""
        self._stopped = True
        self._stop_process()

    def _start_process(self) -> None:
        # On the thread, because it goes on if the task that waits for it is cancelled.
        self._process = self._start()
        if self._stopped:
            self._process.stop()

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.stop()
