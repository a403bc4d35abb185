"""Whose failure it was: the one place that decides what counts against an input.

    INPUT          counts: the same input would fail again (an environment that breaks, a child that hangs, a defect)
    UNCLEAR        something shared died under it (the engine, a worker, the child by SIGKILL): may be its doing or not;
                   counts only when it happens again and again without getting further (``traced.executor.retry``)
    SURROUNDINGS   never counts: a person can mend it and it has nothing to do with the input (Docker down, disk full,
                   no model, database gone); tried again for ever, and shown as waiting for that
    ANSWER         no failure of the machinery: the stage's own answer, raised to the cycle and not tried again
    NOBODY         it was asked to stop (pre-empted, cancelled, the service ends)

Errors are judged by the nearest class named below, so that a new error counts as its parent does; an error of no known
tree is a defect and counts against the input.
"""

import errno
from enum import StrEnum

from traced.executor.job import Ended, Failure, Result


class Blame(StrEnum):
    """Whose failure it was."""

    INPUT = "input"
    UNCLEAR = "unclear"
    SURROUNDINGS = "surroundings"
    ANSWER = "answer"
    NOBODY = "nobody"


BY_ERROR = {
    # traced.errors, traced.executor.errors
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
    # traced.serving.errors
    "ModelError": Blame.SURROUNDINGS,
    "EngineStartError": Blame.SURROUNDINGS,
    "EngineError": Blame.UNCLEAR,
    # agents.errors, traced.llm.errors; what cannot be mended by waiting or by a person is the input's
    "OutOfForm": Blame.INPUT,
    "BudgetSpent": Blame.INPUT,
    "ModelUnavailable": Blame.SURROUNDINGS,
    "ModelRefused": Blame.SURROUNDINGS,
    "LlmError": Blame.SURROUNDINGS,
    # traced.rollout.errors
    "SimulatorError": Blame.UNCLEAR,
    # traced.stages.errors
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
