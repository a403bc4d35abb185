"""What is run and what comes back: plain values only, so that a job can run in another process or on another machine.

Invariants: everything in a ``Job`` is JSON, and so is everything in a ``Report`` and a ``Result``; a job is named by
what it works on (cycle, stage, capability, input hash), which is also what its attempts are counted by. A run that has
ended always has a ``Result`` with evidence, whichever way it ended.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from traced.executor.errors import JobFileError


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
