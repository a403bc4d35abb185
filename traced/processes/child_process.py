"""One way to start, watch and stop a child process.

Invariants: a child has a session of its own (a Ctrl-C in the terminal reaches the parent alone, which then stops it in
order); the pipe on its standard input stays open exactly as long as its parent lives (``traced.processes.parent`` is
the child's side of that); what it prints goes through a pipe into a log of bounded size. Once ``stop`` or ``kill`` has
returned, nothing that the child started is left, whichever session it moved to. Stopping twice is harmless.

A thread that lives as long as this process does the starting, because Linux ties the parent-death signal to the thread
that forked, not to its process (prctl(2), PR_SET_PDEATHSIG).

Fails: ``StartError``. Needs Linux (pidfd_open(2), proc(5)). Not covered: processes in state D, which nothing ends.

A log file that cannot fill the disk, and its last lines.

Invariants: ``path`` and ``path.1`` together never hold more than ``limit`` bytes; the newest text is always kept. A
disk that refuses (full, read-only, gone) never holds up who writes: the text is then dropped, but for the last lines,
which are kept in memory too. Not covered: two writers of one path.

A child that is started again whenever it dies.

Invariants: between two starts there is a pause, longer each time, and short again once it has lived for ``GOOD_S``,
to which the time of its start does not count; what cannot be started is tried again. Not covered: what hangs and does
not die.
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
from traced.core.ownership import this_holder
from traced.core.redaction import redacted_lines
from traced.processes.job import StartError
from traced.processes.process_tree import MARK, SEPARATOR, end_marked

KEPT_BYTES = 16 * 1024  # the end of the log that is kept in memory


class BoundedLog:
    """Appends to ``path``; at half of ``limit`` bytes the file becomes ``path.1``."""

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
        """Append ``text``; never raises for the disk's sake."""
        self._end = (self._end + text)[-KEPT_BYTES:]
        rest = text[-2 * self._half :]  # more than the limit at once: its end is what counts
        try:
            while rest:
                if self._size >= self._half:
                    self._rotate()
                rest = self._append(rest)
        except OSError:
            self._drop()

    def last_lines(self, count: int) -> list[str]:
        """The last ``count`` lines."""
        return self._end.decode(errors="replace").splitlines()[-count:]

    def close(self) -> None:
        """Close the file; the last lines stay readable."""
        self._drop()

    def _open(self) -> None:
        self._file = FileIO(self.path, "ab")
        self._size = self._file.tell()

    def _append(self, text: bytes) -> bytes:
        """Write what fits into the current half; what is left."""
        if self._file is None:
            self._open()
        assert self._file is not None
        written = self._file.write(text[: self._half - self._size]) if self._size < self._half else 0
        self._size += written
        return text[written:]

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
            stream.seek(max(self._size - KEPT_BYTES, 0))
            return stream.read(KEPT_BYTES)


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


log = logging.getLogger(__name__)
LOOK_S = 0.2
GOOD_S = 60.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class Running(Protocol):
    """A child process."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class Kept:
    """One such child; ``begin`` starts it and returns when it is ready."""

    def __init__(self, name: str, begin: Callable[[], Running]) -> None:
        self._name, self._begin = name, begin
        self._running: Running | None = None
        self._over = False

    async def start(self) -> None:
        """Start it; raises what ``begin`` raises."""
        self._running = await asyncio.to_thread(self._begin)
        if self._over:  # it became ready as everything ended
            self._running.stop()

    async def keep(self) -> None:
        """Start it again whenever it dies, until cancelled."""
        failures = 0
        began: float | None = time.monotonic()  # when it became ready; None: it did not
        while True:
            await asyncio.sleep(LOOK_S)
            if self._running is not None and self._running.alive:
                continue
            if began is not None and time.monotonic() - began > GOOD_S:
                failures = 0
            pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            log.warning("%s ended; started again in %.0f s", self._name, pause)
            await asyncio.sleep(pause)
            failures, began = failures + 1, None
            try:
                await asyncio.to_thread(self._end)
                await self.start()
                began = time.monotonic()
            except (TracedError, OSError) as error:
                log.warning("%s cannot be started: %s", self._name, error)

    def stop(self) -> None:
        """End it for good."""
        self._over = True
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.stop()
