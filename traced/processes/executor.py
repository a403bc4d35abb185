"""Jobs as child processes of this one.

Invariants: ``run`` returns only when nothing that the job started is left, and its ``Result`` says how it ended with
evidence. Cancelling stops the child (SIGTERM, then SIGKILL after its grace time; cancelled again: at once). What the
child said counts before how it ended: a result stays a result when the interpreter crashes on its way out.

Fails: ``StartError``; an exception of ``on_report`` stops the child and passes. Needs Linux. Not covered: devices, and
where a job should run.

When a child has to be ended: pure arithmetic on a monotonic clock that is passed in (seconds).

Invariants: silence and lack of progress are measured from the last sign of life that was *seen*; time in which the
watcher itself did not run (a stopped or starved service, whose pipe still holds the child's heartbeats) is not held
against the child. The same phase and counter again is no progress.
Not covered: memory between two samples; a hard ceiling is the business of a cgroup.
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
from pathlib import Path
from typing import Any

from traced.processes.child import STOPPED
from traced.processes.child_process import DRAIN_S, LOG_BYTES, Child, start
from traced.processes.job import (
    Ended,
    Evidence,
    Failure,
    Job,
    Limits,
    Report,
    ReportKind,
    Result,
    StartError,
    failure_from,
)
from traced.processes.process_tree import tree_pss, tree_rss

MIB = 2**20


@dataclass
class Watchdog:
    """One child's clock; ``check_s`` is how often ``verdict`` is asked."""

    limits: Limits
    check_s: float
    started: float
    heard: float = field(init=False)
    advanced: float = field(init=False)
    asked: float = field(init=False)
    mark: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self.heard = self.advanced = self.asked = self.started

    def beat(self, at: float) -> None:
        """The child told something."""
        self.heard = at

    def progress(self, at: float, phase: str, done: int) -> None:
        """The child told how far it is."""
        self.heard = at
        if (phase, done) != self.mark:
            self.mark = (phase, done)
            self.advanced = at

    def verdict(self, at: float, memory_bytes: int) -> tuple[Ended, str] | None:
        """How the child has to be ended now, and why in words; None while it may go on."""
        self._forgive(at)
        limits = self.limits
        if limits.memory_bytes is not None and memory_bytes > limits.memory_bytes:
            what = f"{memory_bytes / MIB:.0f} MiB in all its processes, over the ceiling of"
            return Ended.OUT_OF_MEMORY, f"{what} {limits.memory_bytes / MIB:.0f} MiB"
        if at - self.heard > limits.heartbeat_s:
            return Ended.HUNG, f"no heartbeat for {at - self.heard:.1f} s (limit {limits.heartbeat_s:g} s)"
        if limits.progress_s is not None and at - self.advanced > limits.progress_s:
            told = f"{self.mark[0]!r} {self.mark[1]}" if self.mark else "none at all"
            return Ended.STALLED, f"no progress for {at - self.advanced:.1f} s (limit {limits.progress_s:g} s): {told}"
        return None

    def _forgive(self, at: float) -> None:
        """Move the marks on by the time in which nobody asked; a pause too short to pass for a hang is none."""
        lost = at - self.asked - max(2 * self.check_s, self.limits.heartbeat_s / 4)
        self.asked = at
        if lost > 0:
            self.heard = min(self.heard + lost, at)
            self.advanced = min(self.advanced + lost, at)


LAST_LINES = 12
LINE_BYTES = 64 * 2**20  # of one report


@dataclass(frozen=True)
class LocalExecutor:
    """Runs jobs here; job files and logs lie in ``folder``, one of each per cycle, stage and capability."""

    folder: Path
    log_bytes: int = LOG_BYTES
    check_s: float = 1.0  # between two looks at the watchdog
    clock: Callable[[], float] = time.monotonic

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        """Run the job to its end; see ``traced.processes.job.Executor``."""
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb", buffering=0) as source:
            try:
                child = self._start(job, writing)
            finally:
                os.close(writing)
            run = _Run(child, job, self.clock, Watchdog(job.limits, self.check_s, self.clock()), on_report)
            try:
                on_report(Report(ReportKind.STARTED, {"pid": child.pid}))
                async with _lines(source) as reader:
                    await run.watch(reader)
            finally:
                await _end(child, job.limits.grace_s)
        return run.result()

    def _start(self, job: Job, descriptor: int) -> Child:
        folder = self.folder / _plain(job.cycle_id)
        stem = _plain(f"{job.stage}-{job.capability}".strip("-"))
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
    """One child on its way: what it has told so far, and how it came to its end."""

    child: Child
    job: Job
    clock: Callable[[], float]
    dog: Watchdog
    on_report: Callable[[Report], None]
    value: dict[str, Any] | None = None
    failure: Failure | None = None
    ended: tuple[Ended, str] | None = None
    peak: int = 0
    progress: dict[str, Any] = field(default_factory=dict)

    async def watch(self, reader: asyncio.StreamReader) -> None:
        """Listen until the child has ended, said its last word, or has to be ended; then end it."""
        listening = asyncio.create_task(self._listen(reader))
        try:
            async with _exit_of(self.child) as exited:
                await self._guard(listening, exited)
            await asyncio.to_thread(self._end)
            await asyncio.wait_for(listening, DRAIN_S)  # nobody writes any more; what is still in the pipe counts
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _guard(self, listening: "asyncio.Task[None]", exited: "asyncio.Future[None]") -> None:
        """Return when the child has exited, has said its last word, or has passed a limit."""
        while not exited.done() and self.ended is None:
            await asyncio.wait({listening, exited}, timeout=self.dog.check_s, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                return listening.result()  # or what ``on_report`` raised
            self.ended = self.dog.verdict(self.clock(), self._memory())

    def _end(self) -> None:
        """Let a child that has said its last word go by itself, and end the others."""
        if self.ended is None and self.child.wait(self.job.limits.grace_s):
            self.child.kill()
        elif self.ended is not None and self.ended[0] is Ended.OUT_OF_MEMORY:
            self.child.kill()  # asking would let it grow on
        else:
            self.child.signal(signal.SIGUSR1)  # its threads' tracebacks go to the log
            self.child.stop(self.job.limits.grace_s)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take in report lines up to the last word or the end."""
        while self.value is None and self.failure is None and (line := await reader.readline()):
            try:
                report = _parsed(line)
            except (ValueError, KeyError, TypeError) as error:
                self.failure = Failure(["ReportFault"], f"no report line: {line[:200]!r} ({error!r})")
                return
            self._hear(report)

    def _hear(self, said: Report | Failure | dict[str, Any]) -> None:
        if isinstance(said, Failure):
            self.failure = said
        elif isinstance(said, dict):
            self.value = said
        else:
            self._count(said)
            self.on_report(said)

    def _count(self, report: Report) -> None:
        if report.kind is ReportKind.PROGRESS:
            self.dog.progress(self.clock(), report.data["phase"], report.data["done"])
            self.progress = report.data
        else:
            self.dog.beat(self.clock())
            self.peak = max(self.peak, report.data["peak_rss_bytes"])

    def _memory(self) -> int:
        """Bytes of the whole process tree; shared pages are told apart only where that matters."""
        seen = tree_rss(self.child.pid)
        self.peak = max(self.peak, seen)
        ceiling = self.job.limits.memory_bytes
        return tree_pss(self.child.pid) if ceiling is not None and seen > ceiling else seen

    def result(self) -> Result:
        """How it ended; for after the end."""
        code = self.child.returncode
        assert code is not None
        ended, detail = self._verdict(code)
        evidence = Evidence(
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            detail=detail,
            last_lines=self.child.log.last_lines(LAST_LINES),
            peak_rss_bytes=self.peak,
            seconds=self.clock() - self.dog.started,
            log=str(self.child.log.path),
            progress=self.progress,
        )
        return Result(ended, self.value, self.failure if ended is not Ended.FINISHED else None, evidence)

    def _verdict(self, code: int) -> tuple[Ended, str]:
        how = f"exit code {code}" if code >= 0 else f"ended by {_signal_name(-code)}, code {code}"
        if self.value is not None:
            return Ended.FINISHED, how
        if self.ended is not None:
            return self.ended
        if self.failure is not None:
            return Ended.FAILED, f"{self.failure.type}: {self.failure.message}"
        if code == -signal.SIGALRM:  # its own alarm came before a watchdog that was itself held up
            return Ended.HUNG, f"no heartbeat for so long that its own alarm ended it: {how}"
        if code == STOPPED:
            return Ended.STOPPED, how
        return Ended.CRASHED, f"{how} and no result"


def _parsed(line: bytes) -> Report | Failure | dict[str, Any]:
    """A report, an error, or the result's value."""
    said = json.loads(line)
    kind, data = said["kind"], dict(said["data"])
    if kind == "error":
        return failure_from(data)
    if kind == "result":
        return data
    wanted = {"progress": ("phase", "done"), "heartbeat": ("peak_rss_bytes",)}[kind]
    return Report(ReportKind(kind), {key: data[key] for key in wanted} | data)


def _plain(name: str) -> str:
    """``name`` as a file's name."""
    return re.sub(r"[^\w.@-]", "_", name)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.asynccontextmanager
async def _lines(source: Any) -> AsyncIterator[asyncio.StreamReader]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
    try:
        yield reader
    finally:
        transport.close()


@contextlib.asynccontextmanager
async def _exit_of(child: Child) -> "AsyncIterator[asyncio.Future[None]]":
    """Done when the child has exited (it is not reaped by this)."""
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


async def _end(child: Child, grace_s: float) -> None:
    """Stop the child whatever happens; who is cancelled a second time stops it at once."""
    if child.pidfd < 0:
        return
    me = asyncio.current_task()
    stopping = asyncio.ensure_future(asyncio.to_thread(child.stop, grace_s))
    while not stopping.done():
        if me is not None and me.cancelling() > 1:
            child.kill_group()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(stopping)
    stopping.result()
