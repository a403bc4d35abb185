"""Run a job until it is settled: store each attempt as a row, back off between attempts, quarantine after too many.

Invariants: the row of an attempt is stored before its child starts, and ended there exactly once. If the holder (the
process that runs the attempt) is killed in between, a running row remains. ``recover_lost_attempts`` closes such rows
at the next start, after it has killed the holder's children, so that no two attempts ever work on the same files.
Quarantine is decided from rows alone, so a restart of the service changes nothing.

Errors: ``Quarantined``, ``Preempted`` and the stage's own ``CapabilityError``. After infrastructure failures the job is
retried without limit (``ReportKind.WAITING``). Not covered: an attempt that is cancelled while the store is unavailable
counts as lost.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial

import sqlalchemy
from sqlmodel import Session

from store.database import read_session, write_session
from store.errors import StoreError, StoreUnavailable
from store.repositories.attempts import (
    Attempt,
    AttemptState,
    InputKey,
    QuarantinedInput,
    begin_attempt,
    end_attempt,
    find_quarantined,
    list_attempts,
    list_quarantined,
    quarantine,
    record_heartbeat,
    running_attempts,
)
from traced.config.settings import Settings
from traced.core.errors import CapabilityError
from traced.core.ownership import is_alive
from traced.core.resources import memory_bytes
from traced.jobs.retry import (
    AttemptLedger,
    Backoff,
    OnReport,
    count_unsuccessful,
    counted_failures,
    relevant_attempts,
    retry_delay_s,
    waiting_report,
)
from traced.processes.executor import LocalExecutor
from traced.processes.job import (
    Executor,
    FaultAttribution,
    Job,
    JobOutcome,
    JsonObject,
    Limits,
    Preempted,
    Quarantined,
    Report,
    ReportKind,
    Result,
    StartError,
    attribute_result,
    describe,
)
from traced.processes.process_tree import kill_marked

MIB = 2**20
# Share of the machine's memory for a child: it is stopped before the kernel kills a process, possibly the service.
MEMORY_SHARE = 0.9
# Seconds between two writes of an attempt's heartbeat and progress.
HEARTBEAT_S = 5.0
# Key in a finished attempt's evidence: the value of the job, None if it ended with a ``CapabilityError``.
VALUE_KEY = "value"
# Key in a quarantined input's evidence: the sequence number of the last attempt before the quarantine.
UNTIL_KEY = "until_seq"
STATES = {
    FaultAttribution.INPUT: AttemptState.FAILED,
    FaultAttribution.UNCLEAR: AttemptState.KILLED,
    FaultAttribution.INFRASTRUCTURE: AttemptState.BLOCKED,
    FaultAttribution.ANSWER: AttemptState.FINISHED,
}


async def run_until_settled(executor: Executor, job: Job, ledger: AttemptLedger, on_report: OnReport) -> JsonObject:
    """Run the job, in as many attempts as it takes, and return its value.

    Raises:
        Quarantined: too many attempts failed.
        Preempted: the job stopped on request.
        CapabilityError: the stage itself ended its capability.
    """
    key = InputKey(job.stage, job.capability, job.input_hash)
    # The cycle may have been killed between the answer and its next step: then the stored answer is used again.
    evidence = await ledger.retried_transaction(lambda session: _stored_answer(session, job.cycle_id, key), on_report)
    if evidence is not None:
        return _replay_answer(evidence)
    while True:
        attempts = await ledger.retried_transaction(
            lambda session: _attempts_or_quarantine(session, job.cycle_id, key, ledger), on_report
        )
        await _back_off(attempts, ledger, on_report)
        result = await _attempt(executor, job, key, ledger, on_report)
        if result is None:
            continue
        if result.value is not None:
            return result.value
        if attribute_result(result) is FaultAttribution.ANSWER and result.failure is not None:
            raise CapabilityError(result.failure.message, hint=result.failure.hint)
        if attribute_result(result) is FaultAttribution.NOBODY and result.failure is not None:
            raise Preempted(result.failure.message)
        # Stopped from outside: not counted, but without a pause this would be a tight loop.
        if result.outcome is JobOutcome.STOPPED:
            await ledger.sleep(ledger.backoff.base_s)


def recover_lost_attempts(store: sqlalchemy.Engine, *, now: Callable[[], datetime], silent_s: float) -> list[Attempt]:
    """End the running attempts of dead holders and return them.

    Args:
        silent_s: Seconds without a heartbeat after which a holder on another machine counts as dead.
    """
    with read_session(store) as session:
        abandoned = [attempt for attempt in running_attempts(session) if _is_dead(attempt, now(), silent_s)]
    for holder in {attempt.holder for attempt in abandoned}:
        kill_marked(holder)
    with write_session(store) as session:
        for attempt in abandoned:
            end_attempt(
                session,
                attempt.seq,
                AttemptState.ABANDONED,
                at=now(),
                evidence={"detail": "the process that ran it died"},
            )
    return abandoned


def current_attempts(session: Session, key: InputKey) -> list[Attempt]:
    """Return the attempts at an input after its last success and its last quarantine, oldest first."""
    ends = [entry.evidence.get(UNTIL_KEY, 0) for entry in list_quarantined(session, key=key, released=True)]
    return relevant_attempts(list_attempts(session, key), max(ends, default=0))


def executor(settings: Settings) -> LocalExecutor:
    """Build the executor; its logs are in ``logs/CYCLE/`` of the data directory."""
    return LocalExecutor(settings.data_dir / "logs", log_bytes=settings.executor.log_mb * MIB)


def limits(settings: Settings) -> Limits:
    """Build the limits of a child from the settings."""
    section = settings.executor
    memory = section.memory_mb * MIB or int(MEMORY_SHARE * memory_bytes())
    return Limits(section.heartbeat_s, section.progress_s or None, memory, section.grace_s)


def backoff(settings: Settings) -> Backoff:
    """Build the back-off between attempts from the settings."""
    section = settings.executor
    return Backoff(section.backoff_s, section.backoff_factor, section.backoff_cap_s)


def _stored_answer(session: Session, cycle_id: str, key: InputKey) -> JsonObject | None:
    """Return the evidence of the last attempt that answered this input in this cycle, or None."""
    attempts = [attempt for attempt in list_attempts(session, key) if attempt.cycle_id == cycle_id]
    return next((attempt.evidence for attempt in reversed(attempts) if VALUE_KEY in attempt.evidence), None)


def _replay_answer(evidence: JsonObject) -> JsonObject:
    if evidence[VALUE_KEY] is not None:
        return dict(evidence[VALUE_KEY])
    raise CapabilityError(evidence["failure"]["message"], hint=evidence["failure"]["hint"])


def _attempts_or_quarantine(
    session: Session, cycle_id: str, key: InputKey, ledger: AttemptLedger
) -> list[Attempt] | Quarantined:
    """Return the current attempts, or the error if the input is quarantined; too many failures quarantine it first."""
    entry = find_quarantined(session, key)
    attempts = current_attempts(session, key)
    failures = counted_failures(attempts, ledger.failures)
    if entry is None and len(failures) >= ledger.failures:
        entry = _quarantine_entry(failures, cycle_id, last_seq=attempts[-1].seq, at=ledger.now())
        quarantine(session, entry)
        ledger.on_quarantined(session, entry)
    if entry is None:
        return attempts
    message = f"{entry.key.subject} is quarantined as {entry.id}: {entry.reason}"
    return Quarantined(message, hint=f"traced release {entry.id}")


def _quarantine_entry(failures: list[Attempt], cycle_id: str, *, last_seq: int, at: datetime) -> QuarantinedInput:
    detail = failures[-1].evidence.get("detail", failures[-1].state)
    return QuarantinedInput(
        id=f"p{last_seq}",
        cycle_id=cycle_id,
        key=failures[-1].key,
        reason=f"{len(failures)} attempts failed, the last one: {detail}",
        evidence={UNTIL_KEY: last_seq, "attempts": [_summary(attempt) for attempt in failures]},
        at=at,
    )


def _summary(attempt: Attempt) -> dict[str, object]:
    return {
        "seq": attempt.seq,
        "cycle": attempt.cycle_id,
        "number": attempt.number,
        "state": attempt.state.value,
        "started_at": attempt.started_at.isoformat(),
        "ended_at": str(attempt.ended_at or ""),
        **attempt.evidence,
    }


async def _back_off(attempts: list[Attempt] | Quarantined, ledger: AttemptLedger, on_report: OnReport) -> None:
    if isinstance(attempts, Quarantined):
        raise attempts
    delay = retry_delay_s(attempts, ledger.backoff, seed=ledger.seed, now=ledger.now())
    if delay > 0:
        last = [attempt for attempt in attempts if count_unsuccessful([attempt])][-1]
        on_report(waiting_report(delay, str(last.evidence.get("detail", "")), last.state.value))
        await ledger.sleep(delay)


async def _attempt(
    executor: Executor, job: Job, key: InputKey, ledger: AttemptLedger, on_report: OnReport
) -> Result | None:
    """Make one attempt, from storing its row to ending it; return None if the child could not be started."""
    attempt = await _begin(job, key, ledger, on_report)
    last_report = _LastReport(ledger.now())

    def receive(report: Report) -> None:
        last_report.update(report, ledger.now())
        on_report(report)

    try:
        async with _heartbeats(attempt, last_report, ledger):
            result = await executor.run(job, receive)
    except StartError as error:
        failure = asdict(describe(error))
        evidence = {"detail": str(error), "failure": failure}
        await _end(ledger, attempt, AttemptState.BLOCKED, evidence, on_report)
        return None
    except BaseException as stop:
        with contextlib.suppress(StoreError):
            await ledger.transaction(
                _ending(attempt, AttemptState.STOPPED, ledger.now(), {"detail": type(stop).__name__})
            )
        raise
    await _end(ledger, attempt, _state(result), _evidence(result), on_report)
    return result


async def _begin(job: Job, key: InputKey, ledger: AttemptLedger, on_report: OnReport) -> Attempt:
    # A list, because a cancellation during the transaction loses its return value but not the new row.
    attempts: list[Attempt] = []

    def begin(session: Session) -> None:
        attempts.append(begin_attempt(session, job.cycle_id, key, holder=ledger.holder, at=ledger.now()))

    try:
        await ledger.retried_transaction(begin, on_report)
    except asyncio.CancelledError:
        if attempts:
            with contextlib.suppress(StoreError):
                await ledger.transaction(
                    _ending(attempts[-1], AttemptState.STOPPED, ledger.now(), {"detail": "cancelled"})
                )
        raise
    return attempts[-1]


async def _end(
    ledger: AttemptLedger, attempt: Attempt, state: AttemptState, evidence: JsonObject, on_report: OnReport
) -> None:
    await ledger.retried_transaction(_ending(attempt, state, ledger.now(), evidence), on_report)


def _ending(attempt: Attempt, state: AttemptState, at: datetime, evidence: JsonObject) -> Callable[[Session], None]:
    return lambda session: end_attempt(session, attempt.seq, state, at=at, evidence=evidence)


def _state(result: Result) -> AttemptState:
    if result.outcome is JobOutcome.FINISHED:
        return AttemptState.FINISHED
    return STATES.get(attribute_result(result), AttemptState.STOPPED)


def _evidence(result: Result) -> JsonObject:
    failure = None if result.failure is None else asdict(result.failure)
    answer = {VALUE_KEY: result.value} if _state(result) is AttemptState.FINISHED else {}
    return {**asdict(result.evidence), "ended": result.outcome.value, "failure": failure, **answer}


@dataclass
class _LastReport:
    """The newest report of a running attempt."""

    at: datetime
    pid: int | None = None
    progress: JsonObject | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, report: Report, at: datetime) -> None:
        self.at = at
        if report.kind is ReportKind.STARTED:
            self.pid = report.data.get("pid")
        elif report.kind is ReportKind.PROGRESS:
            self.progress = {key: report.data[key] for key in ("phase", "done", "total") if key in report.data}
        self.changed.set()


@contextlib.asynccontextmanager
async def _heartbeats(attempt: Attempt, last_report: _LastReport, ledger: AttemptLedger) -> AsyncIterator[None]:
    """Write the last report of an attempt into its row while the body runs."""
    writing = asyncio.create_task(_write_heartbeats(attempt, last_report, ledger))
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _write_heartbeats(attempt: Attempt, report: _LastReport, ledger: AttemptLedger) -> None:
    while True:
        await report.changed.wait()
        report.changed.clear()
        write = partial(record_heartbeat, seq=attempt.seq, at=report.at, pid=report.pid, progress=report.progress)
        # A lost write is harmless: the next report is written again.
        with contextlib.suppress(StoreUnavailable):
            await ledger.transaction(write)
        await ledger.sleep(HEARTBEAT_S)


def _is_dead(attempt: Attempt, now: datetime, silent_s: float) -> bool:
    alive = is_alive(attempt.holder)
    # Of a holder on another machine only heartbeats are known. A heartbeat far in the future proves as little as an
    # old one: a clock was changed.
    if alive is None:
        return abs((now - attempt.heartbeat_at).total_seconds()) > silent_s
    return not alive
