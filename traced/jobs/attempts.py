"""Running a job until it has its answer: every attempt a row, waits between them, and parking what fails too often.

Invariants: an attempt is in the store before its child starts and is ended there once; who is killed in between leaves
a running row, which ``recover`` closes as lost at the next start, after it has ended what is left of that holder's
children, so that no two attempts ever work on the same files. Whether an input is parked is decided from its rows
alone, before every attempt, in the transaction that parks it; a restart of the service changes nothing. An answer that
was noted is given again, and not worked out again, when its cycle asks once more: it was killed, or could not write its
next step, right after.

How it fails: ``Parked``, ``Yielded`` and the stage's own ``CapabilityError``. What surrounds the input (Docker, disk,
database) is waited for, without end, and told as ``ReportKind.WAITING``. Cancelling ends the attempt as stopped.
Not covered: an attempt whose end cannot be written because it was cancelled while the store was gone; it is lost then.

The executor and its rules as the settings of a data directory ask for them.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import sqlalchemy
from sqlmodel import Session

from store.database import reading, session
from store.errors import StoreError, StoreUnavailable
from store.repositories.attempts import (
    Attempt,
    AttemptState,
    InputKey,
    ParkedInput,
    beat_attempt,
    begin_attempt,
    end_attempt,
    find_parked,
    list_attempts,
    list_parked,
    park,
    running_attempts,
)
from traced.config.settings import Settings
from traced.core.errors import CapabilityError
from traced.core.ownership import is_alive
from traced.core.resources import memory_bytes
from traced.jobs.retry import Backoff, Ledger, OnReport, counted, since, unsuccessful, wait_s, waiting
from traced.processes.executor import LocalExecutor
from traced.processes.job import (
    Blame,
    Ended,
    Executor,
    Job,
    Limits,
    Parked,
    Report,
    ReportKind,
    Result,
    StartError,
    Yielded,
    blame_result,
    describe,
)
from traced.processes.process_tree import end_marked

BEAT_S = 5.0  # between two writes of an attempt's heartbeat and progress
VALUE = "value"  # in a finished attempt's evidence: its answer, None where that is a failure
UNTIL = "until_seq"  # in a parked input's evidence: the last attempt that led to it
STATES = {
    Blame.INPUT: AttemptState.FAILED,
    Blame.UNCLEAR: AttemptState.KILLED,
    Blame.SURROUNDINGS: AttemptState.BLOCKED,
    Blame.ANSWER: AttemptState.FINISHED,
}


async def run_until_settled(executor: Executor, job: Job, ledger: Ledger, on_report: OnReport) -> dict[str, Any]:
    """The job's value, after as many attempts as it takes. Raises ``Parked``, ``Yielded`` and ``CapabilityError``."""
    key = InputKey(job.stage, job.capability, job.input_hash)
    noted = await ledger.surely(lambda opened: _noted_answer(opened, job.cycle_id, key), on_report)
    if noted is not None:
        return _given_again(noted)
    while True:
        attempts = await ledger.surely(lambda opened: _standing(opened, job.cycle_id, key, ledger), on_report)
        await _wait_turn(attempts, ledger, on_report)
        result = await _attempt(executor, job, key, ledger, on_report)
        if result is None:
            continue
        if result.value is not None:
            return result.value
        if blame_result(result) is Blame.ANSWER and result.failure is not None:
            raise CapabilityError(result.failure.message, hint=result.failure.hint)
        if blame_result(result) is Blame.NOBODY and result.failure is not None:
            raise Yielded(result.failure.message)
        if result.ended is Ended.STOPPED:  # by somebody else; not counted, but not tried again in a tight loop either
            await ledger.sleep(ledger.backoff.base_s)


def recover(store: sqlalchemy.Engine, *, now: Callable[[], datetime], silent_s: float) -> list[Attempt]:
    """Close what dead holders left running, as lost; one elsewhere is dead after ``silent_s`` without a heartbeat."""
    with reading(store) as opened:
        lost = [attempt for attempt in running_attempts(opened) if _is_dead(attempt, now(), silent_s)]
    for holder in {attempt.holder for attempt in lost}:
        end_marked(holder)
    with session(store) as opened:
        for attempt in lost:
            end_attempt(opened, attempt.seq, AttemptState.LOST, at=now(), evidence={"detail": "its holder died"})
    return lost


def standing(opened: Session, key: InputKey) -> list[Attempt]:
    """The attempts at an input that matter now: after its last success and its last parking, oldest first."""
    ends = [parked.evidence.get(UNTIL, 0) for parked in list_parked(opened, key=key, released=True)]
    return since(list_attempts(opened, key), max(ends, default=0))


def _noted_answer(opened: Session, cycle_id: str, key: InputKey) -> dict[str, Any] | None:
    """The evidence of the attempt that answered this input in this cycle."""
    answered = [one for one in list_attempts(opened, key) if one.cycle_id == cycle_id and VALUE in one.evidence]
    return answered[-1].evidence if answered else None


def _given_again(noted: dict[str, Any]) -> dict[str, Any]:
    if noted[VALUE] is not None:
        return dict(noted[VALUE])
    raise CapabilityError(noted["failure"]["message"], hint=noted["failure"]["hint"])


def _standing(opened: Session, cycle_id: str, key: InputKey, ledger: Ledger) -> list[Attempt] | Parked:
    """``standing``, or why there is no further attempt; parks an input that is due."""
    parked = find_parked(opened, key)
    attempts = standing(opened, key)
    against = counted(attempts, ledger.failures)
    if parked is None and len(against) >= ledger.failures:
        parked = _parked_by(against, cycle_id, until=attempts[-1].seq, at=ledger.now())
        park(opened, parked)
        ledger.on_parked(opened, parked)
    return attempts if parked is None else _parked_error(parked)


def _parked_by(against: list[Attempt], cycle_id: str, *, until: int, at: datetime) -> ParkedInput:
    evidence = {UNTIL: until, "attempts": [_shown(attempt) for attempt in against]}
    last = against[-1].evidence.get("detail", against[-1].state)
    return ParkedInput(
        id=f"p{until}",
        cycle_id=cycle_id,
        key=against[-1].key,
        reason=f"{len(against)} attempts failed, the last one: {last}",
        evidence=evidence,
        at=at,
    )


def _shown(attempt: Attempt) -> dict[str, Any]:
    times = {"started_at": attempt.started_at.isoformat(), "ended_at": str(attempt.ended_at or "")}
    where = {"seq": attempt.seq, "cycle": attempt.cycle_id, "number": attempt.number, "state": attempt.state.value}
    return {**where, **times, **attempt.evidence}


def _parked_error(parked: ParkedInput) -> Parked:
    return Parked(f"{parked.key.subject} is parked as {parked.id}: {parked.reason}", hint=f"traced release {parked.id}")


async def _wait_turn(attempts: list[Attempt] | Parked, ledger: Ledger, on_report: OnReport) -> None:
    if isinstance(attempts, Parked):
        raise attempts
    delay = wait_s(attempts, ledger.backoff, seed=ledger.seed, now=ledger.now())
    if delay > 0:
        last = [attempt for attempt in attempts if unsuccessful([attempt])][-1]
        on_report(waiting(delay, str(last.evidence.get("detail", "")), last.state.value))
        await ledger.sleep(delay)


async def _attempt(executor: Executor, job: Job, key: InputKey, ledger: Ledger, on_report: OnReport) -> Result | None:
    """One attempt, from its row to its end; None where the child could not be started."""
    attempt = await _begin(job, key, ledger, on_report)
    news = _News(ledger.now())

    def hear(report: Report) -> None:
        news.hear(report, ledger.now())
        on_report(report)

    try:
        async with _noted(attempt, news, ledger):
            result = await executor.run(job, hear)
    except StartError as error:
        failure = asdict(describe(error))
        evidence = {"detail": str(error), "failure": failure}
        await _end(ledger, attempt, AttemptState.BLOCKED, evidence, on_report)
        return None
    except BaseException as stop:
        with contextlib.suppress(StoreError):
            await ledger.once(_ending(attempt, AttemptState.STOPPED, ledger.now(), {"detail": type(stop).__name__}))
        raise
    await _end(ledger, attempt, _state(result), _evidence(result), on_report)
    return result


async def _begin(job: Job, key: InputKey, ledger: Ledger, on_report: OnReport) -> Attempt:
    begun: list[Attempt] = []

    def begin(opened: Session) -> None:
        begun.append(begin_attempt(opened, job.cycle_id, key, holder=ledger.holder, at=ledger.now()))

    try:
        await ledger.surely(begin, on_report)
    except asyncio.CancelledError:
        if begun:
            with contextlib.suppress(StoreError):
                await ledger.once(_ending(begun[-1], AttemptState.STOPPED, ledger.now(), {"detail": "cancelled"}))
        raise
    return begun[-1]


async def _end(
    ledger: Ledger, attempt: Attempt, state: AttemptState, evidence: dict[str, Any], on_report: OnReport
) -> None:
    await ledger.surely(_ending(attempt, state, ledger.now(), evidence), on_report)


def _ending(attempt: Attempt, state: AttemptState, at: datetime, evidence: dict[str, Any]) -> Callable[[Session], None]:
    return lambda opened: end_attempt(opened, attempt.seq, state, at=at, evidence=evidence)


def _state(result: Result) -> AttemptState:
    if result.ended is Ended.FINISHED:
        return AttemptState.FINISHED
    return STATES.get(blame_result(result), AttemptState.STOPPED)


def _evidence(result: Result) -> dict[str, Any]:
    failure = None if result.failure is None else asdict(result.failure)
    answer = {VALUE: result.value} if _state(result) is AttemptState.FINISHED else {}
    return {**asdict(result.evidence), "ended": result.ended.value, "failure": failure, **answer}


@dataclass
class _News:
    """What a running attempt told last."""

    at: datetime
    pid: int | None = None
    progress: dict[str, Any] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, report: Report, at: datetime) -> None:
        self.at = at
        if report.kind is ReportKind.STARTED:
            self.pid = report.data.get("pid")
        elif report.kind is ReportKind.PROGRESS:
            self.progress = {"phase": report.data["phase"], "done": report.data["done"]}
        self.changed.set()


@contextlib.asynccontextmanager
async def _noted(attempt: Attempt, news: _News, ledger: Ledger) -> AsyncIterator[None]:
    """Write the news of an attempt into its row while the body runs."""
    writing = asyncio.create_task(_write_news(attempt, news, ledger))
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _write_news(attempt: Attempt, news: _News, ledger: Ledger) -> None:
    while True:
        await news.changed.wait()
        news.changed.clear()
        note = partial(beat_attempt, seq=attempt.seq, at=news.at, pid=news.pid, progress=news.progress)
        with contextlib.suppress(StoreUnavailable):  # the next news will do
            await ledger.once(note)
        await ledger.sleep(BEAT_S)


def _is_dead(attempt: Attempt, now: datetime, silent_s: float) -> bool:
    alive = is_alive(attempt.holder)
    if alive is None:  # a heartbeat from far in the future says as little as one from long ago: a clock was set
        return abs((now - attempt.heartbeat_at).total_seconds()) > silent_s
    return not alive


MIB = 2**20
SHARE = 0.9  # of the memory that there is: before the kernel ends something, which might be the service


def executor(settings: Settings) -> LocalExecutor:
    """Jobs as child processes; their logs lie in ``logs/CYCLE/`` of the data directory."""
    return LocalExecutor(settings.data_dir / "logs", log_bytes=settings.executor.log_mb * MIB)


def limits(settings: Settings) -> Limits:
    """When a child is ended."""
    section = settings.executor
    memory = section.memory_mb * MIB or int(SHARE * memory_bytes())
    return Limits(section.heartbeat_s, section.progress_s or None, memory, section.grace_s)


def backoff(settings: Settings) -> Backoff:
    """How long to wait before the next attempt."""
    section = settings.executor
    return Backoff(section.backoff_s, section.backoff_factor, section.backoff_cap_s)
