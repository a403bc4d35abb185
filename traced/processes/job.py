"""Jobs, their reports and results, and the attribution of faults, which decides what counts against an input.

Everything in a ``Job``, ``Report`` and ``Result`` is JSON, so that a job can run in another process or on another
machine. Every run that has ended has a ``Result`` with evidence; only what goes wrong around a job is an exception:

TracedError
└── ExecutorError
    ├── StartError    the child could not be started; nothing is known about its input
    ├── JobFileError  (in the child) the job file cannot be read
    ├── Preempted     the job stopped at a checkpoint on request; it continues later
    └── Quarantined   the input failed too often and waits for a person; the cycle continues without it
"""

import errno
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from traced.core.errors import TracedError

JsonObject = dict[str, Any]


class ExecutorError(TracedError):
    """A job could not be run."""


class StartError(ExecutorError):
    """The child process could not be started."""


class JobFileError(ExecutorError):
    """The job file cannot be read."""


class Preempted(ExecutorError):
    """The job stopped because its device or its place was needed elsewhere; it continues later."""


class Quarantined(ExecutorError):
    """The input failed too often; it is set aside until a person releases it."""


@dataclass(frozen=True)
class Limits:
    """Limits after which a child is stopped; None disables a limit.

    Args:
        heartbeat_s: Seconds of silence after which it counts as hung; the start of the interpreter is included.
        progress_s: Seconds of heartbeats without progress.
        memory_bytes: Memory of its whole process tree.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    heartbeat_s: float = 120.0
    progress_s: float | None = None
    memory_bytes: int | None = None
    grace_s: float = 15.0


@dataclass(frozen=True)
class Job:
    """A run of ``python -m module`` on ``arguments``; ``capability`` is "" for a stage of the whole cycle."""

    module: str
    arguments: JsonObject
    cycle_id: str
    stage: str
    capability: str = ""
    input_hash: str = ""
    limits: Limits = Limits()
    variables: dict[str, str] = field(default_factory=dict)  # environment variables of the child

    def to_json(self) -> str:
        """Return the text of the job file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


class ReportKind(StrEnum):
    """Kind of a report, with the keys of its data."""

    STARTED = "started"  # pid
    HEARTBEAT = "heartbeat"  # peak_rss_bytes of the child itself
    PROGRESS = "progress"  # phase, done, and details of the stage
    WAITING = "waiting"  # between two attempts: seconds, for, after


@dataclass(frozen=True)
class Report:
    """One message of a running job."""

    kind: ReportKind
    data: JsonObject


class JobOutcome(StrEnum):
    """How a run ended."""

    FINISHED = "finished"  # with a value
    FAILED = "failed"  # the child reported an error
    STOPPED = "stopped"  # the child confirmed a stop request
    CRASHED = "crashed"  # the child ended without a report
    HUNG = "hung"  # no heartbeat; stopped by the watchdog
    STALLED = "stalled"  # heartbeats without progress; stopped by the watchdog
    OUT_OF_MEMORY = "out_of_memory"  # over the memory limit; stopped by the watchdog


@dataclass(frozen=True)
class Failure:
    """An error as plain data: the names of its class and base classes (nearest first), message, hint and errno."""

    types: list[str]
    message: str
    hint: str = ""
    errno: int | None = None

    @property
    def type(self) -> str:
        """Return the name of the error's class."""
        return self.types[0]


@dataclass(frozen=True)
class Evidence:
    """How a child ended, its last log lines and the resources it used."""

    exit_code: int | None  # None if a signal ended it
    signal: str | None
    detail: str  # a sentence with the limit and the value seen
    last_lines: list[str]
    peak_rss_bytes: int
    seconds: float
    log: str
    progress: JsonObject  # data of the last progress report


@dataclass(frozen=True)
class Result:
    """A run that has ended: ``value`` if it finished, ``failure`` if the child reported an error."""

    outcome: JobOutcome
    value: JsonObject | None
    failure: Failure | None
    evidence: Evidence


class Executor(Protocol):
    """Runs jobs: as local processes now (``traced.processes.executor.LocalExecutor``), on a cluster later."""

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        """Run the job to its end; cancellation stops it with all its descendants.

        Raises:
            StartError: the child could not be started.
        """
        ...


def read_job(path: Path) -> Job:
    """Read a job file; raises ``JobFileError``."""
    try:
        values: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**values, "limits": Limits(**values.get("limits", {}))})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise JobFileError(f"{path} is not a job file: {error}", hint=f"less {path}") from error


def failure_from(value: JsonObject) -> Failure:
    """Parse the data of an error line."""
    return Failure(list(value["types"]), str(value["message"]), str(value["hint"]), value["errno"])


class FaultAttribution(StrEnum):
    """What a failure is attributed to.

    INPUT           counts: the same input would fail again (a broken environment, a hang, a defect)
    UNCLEAR         a shared component died (engine, worker, SIGKILL of the child): counts only when it recurs without
                    progress (``traced.jobs.retry``)
    INFRASTRUCTURE  never counts: a person can fix it and it has nothing to do with the input (Docker down, disk full,
                    no model, database gone); retried without end, and shown as waiting
    ANSWER          not a failure of the machinery: the stage's own refusal, raised to the cycle and not retried
    NOBODY          a requested stop (preemption, cancellation, shutdown of the service)
    """

    INPUT = "input"
    UNCLEAR = "unclear"
    INFRASTRUCTURE = "surroundings"
    ANSWER = "answer"
    NOBODY = "nobody"


# By class name, because errors come from processes that import other packages than this one. An error is attributed by
# its nearest listed base class, so that a new error counts as its parent does; an error outside every listed tree is a
# defect and counts against the input.
FAULT_BY_ERROR = {
    # traced.core.errors, traced.processes.job
    "ConfigError": FaultAttribution.INFRASTRUCTURE,
    "StartError": FaultAttribution.INFRASTRUCTURE,
    # store.errors
    "StoreUnavailable": FaultAttribution.INFRASTRUCTURE,
    "StoreVersionError": FaultAttribution.INFRASTRUCTURE,
    # sandbox.errors
    "EngineDown": FaultAttribution.INFRASTRUCTURE,
    "ImageMissing": FaultAttribution.INFRASTRUCTURE,
    "WorkerDied": FaultAttribution.UNCLEAR,
    "Deadline": FaultAttribution.INPUT,
    "ProtocolFault": FaultAttribution.INPUT,
    "EnvironmentFault": FaultAttribution.INPUT,
    "AgentFault": FaultAttribution.INPUT,
    "UserFault": FaultAttribution.INPUT,
    "SandboxError": FaultAttribution.UNCLEAR,
    # traced.training.errors
    "DiskError": FaultAttribution.INFRASTRUCTURE,
    "TrainingPaused": FaultAttribution.NOBODY,
    "TrainerDied": FaultAttribution.UNCLEAR,
    "EngineLost": FaultAttribution.INFRASTRUCTURE,
    # traced.inference.errors
    "ModelError": FaultAttribution.INFRASTRUCTURE,
    "EngineStartError": FaultAttribution.INFRASTRUCTURE,
    "EngineError": FaultAttribution.UNCLEAR,
    # agents.errors, traced.llm.connection: errors that neither waiting nor a person can fix count against the input
    "OutOfForm": FaultAttribution.INPUT,
    "BudgetSpent": FaultAttribution.INPUT,
    "ModelUnavailable": FaultAttribution.INFRASTRUCTURE,
    "ModelRefused": FaultAttribution.INFRASTRUCTURE,
    "LlmError": FaultAttribution.INFRASTRUCTURE,
    # traced.targets.errors: a target that cannot be loaded is not the fault of a capability
    "TargetFault": FaultAttribution.INFRASTRUCTURE,
    "SimulatorError": FaultAttribution.UNCLEAR,
    "UserUnavailable": FaultAttribution.INFRASTRUCTURE,
    # traced.core.errors
    "CapabilityError": FaultAttribution.ANSWER,
    # Python's own
    "ConnectionError": FaultAttribution.UNCLEAR,
    # sqlite3 and psycopg, passed on by the checkpointer: locked, full, read-only, gone
    "OperationalError": FaultAttribution.INFRASTRUCTURE,
}
DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PERMISSION_ERRNOS = (errno.EACCES, errno.EPERM)
# Unclear, because the leak may be the stage's own or another program's.
RESOURCE_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
FAULT_BY_ERRNO = {
    **dict.fromkeys((*DISK_ERRNOS, *PERMISSION_ERRNOS), FaultAttribution.INFRASTRUCTURE),
    **dict.fromkeys(RESOURCE_ERRNOS, FaultAttribution.UNCLEAR),
}
FAULT_BY_OUTCOME = {
    JobOutcome.FINISHED: FaultAttribution.NOBODY,
    JobOutcome.STOPPED: FaultAttribution.NOBODY,
    JobOutcome.CRASHED: FaultAttribution.INPUT,
    JobOutcome.HUNG: FaultAttribution.INPUT,
    JobOutcome.STALLED: FaultAttribution.INPUT,
    JobOutcome.OUT_OF_MEMORY: FaultAttribution.INPUT,
}


def attribute_fault(outcome: JobOutcome, failure: Failure | None, signal: str | None) -> FaultAttribution:
    """Attribute the outcome of a run; ``signal`` names the signal that ended the child, if any."""
    if outcome is JobOutcome.FAILED and failure is not None:
        return _attribute_error(failure)
    if outcome is JobOutcome.CRASHED and signal in ("SIGKILL", "SIGTERM"):
        # Sent from outside: by the kernel when memory ran out, or by a person.
        return FaultAttribution.UNCLEAR
    return FAULT_BY_OUTCOME.get(outcome, FaultAttribution.INPUT)


def attribute_result(result: Result) -> FaultAttribution:
    """Attribute a result; see ``attribute_fault``."""
    return attribute_fault(result.outcome, result.failure, result.evidence.signal)


def describe(error: BaseException) -> Failure:
    """Turn an error into plain data, with the errno of the system error that caused it."""
    types = [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException)]
    message = str(getattr(error, "message", "")) or str(error) or types[0]
    return Failure(types, message, str(getattr(error, "hint", "")), _errno(error))


def _attribute_error(failure: Failure) -> FaultAttribution:
    attribution = next((FAULT_BY_ERROR[name] for name in failure.types if name in FAULT_BY_ERROR), None)
    return attribution or FAULT_BY_ERRNO.get(failure.errno or 0, FaultAttribution.INPUT)


def _errno(error: BaseException | None) -> int | None:
    """Return the error number of this error or of the nearest cause that has one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None
