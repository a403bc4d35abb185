"""What is run and what comes back: plain values only, so that a job can run in another process or on another machine.

Invariants: everything in a ``Job`` is JSON, and so is everything in a ``Report`` and a ``Result``; a job is named by
what it works on (cycle, stage, capability, input hash), which is also what its attempts are counted by. A run that has
ended always has a ``Result`` with evidence, whichever way it ended.

What can go wrong around a job.

TracedError
└── ExecutorError
    ├── StartError    the child could not be started at all: nothing is known about its input
    ├── JobFileError  (in the child) the job file cannot be read
    ├── Yielded       the job gave way when it was asked to; nothing failed, and it goes on later
    └── Parked        the input failed too often and waits for a person; the cycle goes on without it

What goes wrong inside a job is no exception here: it is a ``Result`` with its evidence (``traced.processes.job``).

Whose failure it was: the one place that decides what counts against an input.

    INPUT          counts: the same input would fail again (an environment that breaks, a child that hangs, a defect)
    UNCLEAR        something shared died under it (the engine, a worker, the child by SIGKILL): may be its doing or not;
                   counts only when it happens again and again without getting further (``traced.jobs.retry``)
    SURROUNDINGS   never counts: a person can mend it and it has nothing to do with the input (Docker down, disk full,
                   no model, database gone); tried again for ever, and shown as waiting for that
    ANSWER         no failure of the machinery: the stage's own answer, raised to the cycle and not tried again
    NOBODY         it was asked to stop (pre-empted, cancelled, the service ends)

Errors are judged by the nearest class named below, so that a new error counts as its parent does; an error of no known
tree is a defect and counts against the input.
"""

import errno
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from traced.core.errors import TracedError


class ExecutorError(TracedError):
    """A job could not be run."""


class StartError(ExecutorError):
    """The child process could not be started."""


class JobFileError(ExecutorError):
    """The job file cannot be read."""


class Yielded(ExecutorError):
    """The job gave way when it was asked to."""


class Parked(ExecutorError):
    """The input failed too often; it is left aside until a person releases it."""


@dataclass(frozen=True)
class Limits:
    """When a child is ended. Times in seconds, memory in bytes over its whole process tree; None: no such limit."""

    heartbeat_s: float = 120.0  # silence after which it counts as hung; covers the start of the interpreter as well
    progress_s: float | None = None  # heartbeats but nothing new
    memory_bytes: int | None = None
    grace_s: float = 15.0  # between asking it to stop and killing it


@dataclass(frozen=True)
class Job:
    """``python -m module`` on ``arguments``; ``capability`` is "" for a stage of the whole cycle."""

    module: str
    arguments: dict[str, Any]
    cycle_id: str
    stage: str
    capability: str = ""
    input_hash: str = ""
    limits: Limits = Limits()
    variables: dict[str, str] = field(default_factory=dict)  # environment variables of the child

    def to_json(self) -> str:
        """The job as it lies on disk."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


class ReportKind(StrEnum):
    """What a running job tells."""

    STARTED = "started"  # data: pid
    HEARTBEAT = "heartbeat"  # data: peak_rss_bytes of the child itself
    PROGRESS = "progress"  # data: phase, done, and whatever else the stage wants to tell
    WAITING = "waiting"  # between two attempts: seconds, for, hint


@dataclass(frozen=True)
class Report:
    """One thing that a running job told."""

    kind: ReportKind
    data: dict[str, Any]


class Ended(StrEnum):
    """How a run ended."""

    FINISHED = "finished"  # with a value
    FAILED = "failed"  # the child said why
    STOPPED = "stopped"  # it was asked to stop, and said so
    CRASHED = "crashed"  # it ended without a word
    HUNG = "hung"  # no heartbeat: ended by the watchdog
    STALLED = "stalled"  # heartbeats, but no progress: ended by the watchdog
    OUT_OF_MEMORY = "out_of_memory"  # over its ceiling: ended by the watchdog


@dataclass(frozen=True)
class Failure:
    """An error that crossed a border: its class and the classes above it (nearest first), message and hint."""

    types: list[str]
    message: str
    hint: str = ""
    errno: int | None = None

    @property
    def type(self) -> str:
        """Name of the error's class."""
        return self.types[0]


@dataclass(frozen=True)
class Evidence:
    """What is left of a child: its end, its last log lines, and what it took."""

    exit_code: int | None  # None where a signal ended it
    signal: str | None
    detail: str  # in words, with the limit and the value seen
    last_lines: list[str]
    peak_rss_bytes: int
    seconds: float
    log: str
    progress: dict[str, Any]  # the last progress it told


@dataclass(frozen=True)
class Result:
    """A run that has ended: ``value`` when it finished, ``failure`` when the child said why not."""

    ended: Ended
    value: dict[str, Any] | None
    failure: Failure | None
    evidence: Evidence


class Executor(Protocol):
    """Runs jobs: as local processes now, on a cluster later."""

    async def run(self, job: Job, on_report: Callable[[Report], None]) -> Result:
        """Run the job to its end. Cancelling stops it and everything it started. Raises ``StartError``."""
        ...


def read_job(path: Path) -> Job:
    """The job in a file. Raises ``JobFileError``."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**values, "limits": Limits(**values.get("limits", {}))})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise JobFileError(f"{path} holds no job: {error}", hint=f"less {path}") from error


def failure_from(value: Mapping[str, Any]) -> Failure:
    """The failure in an error line."""
    return Failure(list(value["types"]), str(value["message"]), str(value["hint"]), value["errno"])


class Blame(StrEnum):
    """Whose failure it was."""

    INPUT = "input"
    UNCLEAR = "unclear"
    SURROUNDINGS = "surroundings"
    ANSWER = "answer"
    NOBODY = "nobody"


BY_ERROR = {
    # traced.core.errors, traced.processes.job
    "ConfigError": Blame.SURROUNDINGS,
    "StartError": Blame.SURROUNDINGS,
    # store.errors
    "StoreUnavailable": Blame.SURROUNDINGS,
    "StoreVersionError": Blame.SURROUNDINGS,
    # sandbox.errors
    "EngineDown": Blame.SURROUNDINGS,
    "ImageMissing": Blame.SURROUNDINGS,
    "WorkerDied": Blame.UNCLEAR,
    "Deadline": Blame.INPUT,
    "ProtocolFault": Blame.INPUT,
    "EnvironmentFault": Blame.INPUT,
    "AgentFault": Blame.INPUT,
    "SandboxError": Blame.UNCLEAR,
    # traced.training.errors
    "DiskError": Blame.SURROUNDINGS,
    "TrainingPaused": Blame.NOBODY,
    "TrainerDied": Blame.UNCLEAR,
    # traced.inference.errors
    "ModelError": Blame.SURROUNDINGS,
    "EngineStartError": Blame.SURROUNDINGS,
    "EngineError": Blame.UNCLEAR,
    # agents.errors, traced.llm.connection; what cannot be mended by waiting or by a person is the input's
    "OutOfForm": Blame.INPUT,
    "BudgetSpent": Blame.INPUT,
    "ModelUnavailable": Blame.SURROUNDINGS,
    "ModelRefused": Blame.SURROUNDINGS,
    "LlmError": Blame.SURROUNDINGS,
    # traced.rollouts.errors
    "SimulatorError": Blame.UNCLEAR,
    # traced.core.errors
    "CapabilityError": Blame.ANSWER,
    # Python's own
    "ConnectionError": Blame.UNCLEAR,
    # sqlite3 and psycopg, where the checkpointer passes them on: locked, full, read-only, gone
    "OperationalError": Blame.SURROUNDINGS,
}
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
PERMISSION = (errno.EACCES, errno.EPERM)
MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # a leak of the stage, or of something else
BY_ERRNO = dict.fromkeys((*DISK, *PERMISSION), Blame.SURROUNDINGS) | dict.fromkeys(MACHINE, Blame.UNCLEAR)
BY_END = {
    Ended.FINISHED: Blame.NOBODY,
    Ended.STOPPED: Blame.NOBODY,
    Ended.CRASHED: Blame.INPUT,
    Ended.HUNG: Blame.INPUT,
    Ended.STALLED: Blame.INPUT,
    Ended.OUT_OF_MEMORY: Blame.INPUT,
}


def blame(ended: Ended, failure: Failure | None, signal: str | None) -> Blame:
    """Whose failure a run was that ended like this; ``signal`` is what ended the child, if one did."""
    if ended is Ended.FAILED and failure is not None:
        return _blame_error(failure)
    if ended is Ended.CRASHED and signal in ("SIGKILL", "SIGTERM"):
        return Blame.UNCLEAR  # from outside: the kernel short of memory, or somebody
    return BY_END.get(ended, Blame.INPUT)


def blame_result(result: Result) -> Blame:
    """``blame`` of a run's result."""
    return blame(result.ended, result.failure, result.evidence.signal)


def describe(error: BaseException) -> Failure:
    """The error as it crosses a border; a full disk under it is named by its number."""
    types = [kind.__name__ for kind in type(error).__mro__ if kind not in (object, BaseException)]
    message = str(getattr(error, "message", "")) or str(error) or types[0]
    return Failure(types, message, str(getattr(error, "hint", "")), _errno(error))


def _blame_error(failure: Failure) -> Blame:
    named = next((BY_ERROR[name] for name in failure.types if name in BY_ERROR), None)
    return named or BY_ERRNO.get(failure.errno or 0, Blame.INPUT)


def _errno(error: BaseException | None) -> int | None:
    """The system's error number, of this error or of what it was raised from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__
    return None
