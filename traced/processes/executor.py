"""Run jobs as child processes and stop those that hang, stall or exceed their memory.

``run`` returns only when no process of the job is left. A result that the child has sent stays a result, even if the
interpreter crashes during its exit. Errors: ``StartError``; an exception of ``on_report`` stops the child and is
raised. Needs Linux. Not covered: choice of a device or machine; memory between two samples (a hard limit needs a
cgroup).
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from traced.processes.child import EXIT_STOPPED
from traced.processes.child_process import DRAIN_S, LOG_BYTES, Child, start
from traced.processes.job import (
    Evidence,
    Failure,
    Job,
    JobOutcome,
    JsonObject,
    Limits,
    Report,
    ReportKind,
    Result,
    StartError,
    failure_from,
)
from traced.processes.process_tree import tree_pss, tree_rss

MIB = 2**20
LAST_LINES = 12
# Maximum size of one report line.
MAX_LINE_BYTES = 64 * 2**20


@dataclass
class Watchdog:
    """Decides when a child has to be stopped, on a monotonic clock in seconds that is passed in.

    Args:
        check_s: The interval between two calls of ``verdict``.
    """

    limits: Limits
    check_s: float
    started: float
    last_heartbeat: float = field(init=False)
    last_progress: float = field(init=False)
    last_check: float = field(init=False)
    position: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self.last_heartbeat = self.last_progress = self.last_check = self.started

    def beat(self, at: float) -> None:
        """Record a heartbeat."""
        self.last_heartbeat = at

    def progress(self, at: float, phase: str, done: int) -> None:
        """Record a progress report; the same phase and counter again counts only as a heartbeat."""
        self.last_heartbeat = at
        if (phase, done) != self.position:
            self.position = (phase, done)
            self.last_progress = at

    def verdict(self, at: float, memory_bytes: int) -> tuple[JobOutcome, str] | None:
        """Return why the child has to be stopped, with a sentence for people; None while it may continue."""
        self._discount_gap(at)
        limits = self.limits
        if limits.memory_bytes is not None and memory_bytes > limits.memory_bytes:
            used, limit = memory_bytes / MIB, limits.memory_bytes / MIB
            return JobOutcome.OUT_OF_MEMORY, f"{used:.0f} MiB in all its processes, above the limit of {limit:.0f} MiB"
        if at - self.last_heartbeat > limits.heartbeat_s:
            silence_s = at - self.last_heartbeat
            return JobOutcome.HUNG, f"no heartbeat for {silence_s:.1f} s (limit {limits.heartbeat_s:g} s)"
        if limits.progress_s is not None and at - self.last_progress > limits.progress_s:
            stall_s = at - self.last_progress
            position = f"{self.position[0]!r} {self.position[1]}" if self.position else "no position reported"
            detail = f"no progress for {stall_s:.1f} s (limit {limits.progress_s:g} s): {position}"
            return JobOutcome.STALLED, detail
        return None

    def _discount_gap(self, at: float) -> None:
        # Time in which the watchdog itself did not run (a stopped or starved service, whose pipe still holds the
        # child's heartbeats) does not count against the child. Gaps too short to pass for a hang are ordinary delays.
        gap_s = at - self.last_check - max(2 * self.check_s, self.limits.heartbeat_s / 4)
        self.last_check = at
        if gap_s > 0:
            self.last_heartbeat = min(self.last_heartbeat + gap_s, at)
            self.last_progress = min(self.last_progress + gap_s, at)


@dataclass(frozen=True)
class LocalExecutor:
    """Runs jobs on this machine, with one job file and one log per cycle, stage and capability in ``folder``.

    Args:
        check_s: Seconds between two checks of the watchdog.
    """

    folder: Path
    log_bytes: int = LOG_BYTES
    check_s: float = 1.0
    clock: Callable[[], float] = time.monotonic

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        """Run the job to its end; see ``traced.processes.job.Executor``."""
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb", buffering=0) as source:
            try:
                child = self._start(job, write_end)
            finally:
                # Only the child may hold the write end, or its exit would not end the stream.
                os.close(write_end)
            run = _Run(child, job, self.clock, Watchdog(job.limits, self.check_s, self.clock()), on_report)
            try:
                on_report(Report(ReportKind.STARTED, {"pid": child.pid}))
                async with _stream_reader(source) as reader:
                    await run.watch(reader)
            finally:
                await _stop(child, job.limits.grace_s)
        return run.result()

    def _start(self, job: Job, descriptor: int) -> Child:
        folder = self.folder / _file_name(job.cycle_id)
        stem = _file_name(f"{job.stage}-{job.capability}".strip("-"))
        path = folder / f"{stem}.job.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(job.to_json(), encoding="utf-8")
        except OSError as error:
            raise StartError(f"cannot write the job file {path}: {error}", hint="traced doctor") from error
        return start(
            ["-m", job.module, str(path), "--report-fd", str(descriptor)],
            log=folder / f"{stem}.log",
            log_bytes=self.log_bytes,
            variables=job.variables,
            pass_fds=[descriptor],
        )


@dataclass
class _Run:
    """The state of one running child: its last reports, and the limit that it exceeded."""

    child: Child
    job: Job
    clock: Callable[[], float]
    watchdog: Watchdog
    on_report: Callable[[Report], None]
    value: JsonObject | None = None
    failure: Failure | None = None
    breach: tuple[JobOutcome, str] | None = None
    peak: int = 0
    progress: JsonObject = field(default_factory=dict)

    async def watch(self, reader: asyncio.StreamReader) -> None:
        """Read reports until the child has exited, sent its result or error, or exceeded a limit; then stop it."""
        listening = asyncio.create_task(self._listen(reader))
        try:
            async with _exit_of(self.child) as exited:
                await self._guard(listening, exited)
            await asyncio.to_thread(self._stop_child)
            # No process writes any more, but a result may still be in the pipe.
            async with asyncio.timeout(DRAIN_S):
                await listening
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _guard(self, listening: "asyncio.Task[None]", exited: "asyncio.Future[None]") -> None:
        """Return when the child has exited, has sent its result or error, or has exceeded a limit."""
        while not exited.done() and self.breach is None:
            await asyncio.wait({listening, exited}, timeout=self.watchdog.check_s, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                # Raises what ``on_report`` raised.
                return listening.result()
            self.breach = self.watchdog.verdict(self.clock(), self._memory())

    def _stop_child(self) -> None:
        """Let a child that has sent its result exit by itself, and stop the others."""
        if self.breach is None and self.child.wait(self.job.limits.grace_s):
            self.child.kill()
        elif self.breach is not None and self.breach[0] is JobOutcome.OUT_OF_MEMORY:
            # At once, because it would keep growing during the grace time.
            self.child.kill()
        else:
            # Writes the tracebacks of all threads to the log (faulthandler in the child).
            self.child.signal(signal.SIGUSR1)
            self.child.stop(self.job.limits.grace_s)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read report lines until a result, an error or the end of the stream."""
        while self.value is None and self.failure is None and (line := await reader.readline()):
            try:
                report = _parse_line(line)
            except (ValueError, KeyError, TypeError) as error:
                self.failure = Failure(["ReportFault"], f"not a report line: {line[:200]!r} ({error!r})")
                return
            self._receive(report)

    def _receive(self, message: Report | Failure | JsonObject) -> None:
        if isinstance(message, Failure):
            self.failure = message
        elif isinstance(message, dict):
            self.value = message
        else:
            self._update_watchdog(message)
            self.on_report(message)

    def _update_watchdog(self, report: Report) -> None:
        if report.kind is ReportKind.PROGRESS:
            self.watchdog.progress(self.clock(), report.data["phase"], report.data["done"])
            self.progress = report.data
        else:
            self.watchdog.beat(self.clock())
            self.peak = max(self.peak, report.data["peak_rss_bytes"])

    def _memory(self) -> int:
        """Return the bytes of the whole process tree."""
        rss = tree_rss(self.child.pid)
        self.peak = max(self.peak, rss)
        limit = self.job.limits.memory_bytes
        # The sum counts shared pages several times; the exact figure is slow and needed only above the limit.
        return tree_pss(self.child.pid) if limit is not None and rss > limit else rss

    def result(self) -> Result:
        """Return the result of a child that has ended."""
        code = self.child.returncode
        assert code is not None
        outcome, detail = self._verdict(code)
        evidence = Evidence(
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            detail=detail,
            last_lines=self.child.log.last_lines(LAST_LINES),
            peak_rss_bytes=self.peak,
            seconds=self.clock() - self.watchdog.started,
            log=str(self.child.log.path),
            progress=self.progress,
        )
        return Result(outcome, self.value, self.failure if outcome is not JobOutcome.FINISHED else None, evidence)

    def _verdict(self, code: int) -> tuple[JobOutcome, str]:
        detail = f"exit code {code}" if code >= 0 else f"ended by {_signal_name(-code)}, code {code}"
        if self.value is not None:
            return JobOutcome.FINISHED, detail
        if self.breach is not None:
            return self.breach
        if self.failure is not None:
            return JobOutcome.FAILED, f"{self.failure.type}: {self.failure.message}"
        # The child's own alarm fires first when the watchdog itself was held up.
        if code == -signal.SIGALRM:
            return JobOutcome.HUNG, f"no heartbeat; the alarm of the process ended it: {detail}"
        if code == EXIT_STOPPED:
            return JobOutcome.STOPPED, detail
        return JobOutcome.CRASHED, f"{detail} without a result"


def _parse_line(line: bytes) -> Report | Failure | JsonObject:
    """Parse a line into a report, an error, or the value of the result."""
    message = json.loads(line)
    kind, data = message["kind"], dict(message["data"])
    if kind == "error":
        return failure_from(data)
    if kind == "result":
        return data
    required = {"progress": ("phase", "done"), "heartbeat": ("peak_rss_bytes",)}[kind]
    return Report(ReportKind(kind), {key: data[key] for key in required} | data)


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.@-]", "_", name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.asynccontextmanager
async def _stream_reader(source: FileIO) -> AsyncIterator[asyncio.StreamReader]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    try:
        yield reader
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def _exit_of(child: Child) -> "AsyncIterator[asyncio.Future[None]]":
    """Yield a future that is done when the child has exited; the child is not reaped."""
    loop = asyncio.get_running_loop()
    exited = loop.create_future()

    def set_exited() -> None:
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(child.pidfd, set_exited)
    try:
        yield exited
    finally:
        loop.remove_reader(child.pidfd)
        exited.cancel()


async def _stop(child: Child, grace_s: float) -> None:
    """Stop the child even if this task is cancelled; a second cancellation skips the grace time."""
    if child.pidfd < 0:
        return
    task = asyncio.current_task()
    stopping = asyncio.ensure_future(asyncio.to_thread(child.stop, grace_s))
    while not stopping.done():
        if task is not None and task.cancelling() > 1:
            child.kill_group()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(stopping)
    stopping.result()
