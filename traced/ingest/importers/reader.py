"""What the reader of every format gets and yields, and how records become outcomes and trajectories.

A reader yields ``Step``s in the order of the file and resumes from the resume point of any of them. A strict reader
yields every bad record before the first trajectory. Readers redact: what they yield may be stored as it is.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from store.content import digest
from store.text import replace_surrogates
from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.ingest.importers.errors import BadRecord, UnreadableFile
from traced.ingest.importers.json_file import (
    BOM_BYTES,
    FILE_START,
    FilePosition,
    Record,
    first_key,
    is_array,
    read_array,
    read_head,
    read_lines,
)
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import Labels
from traced.scoring.rules import SUCCESS_THRESHOLD

# JSON that a reader resumes from: the position in the file, and what the format needs besides.
ResumePoint = dict[str, Any]
OutcomeReward = tuple[Outcome, float]

MAX_KEY_LENGTH = 200
UNKNOWN_OUTCOME: OutcomeReward = (Outcome.UNKNOWN, 0.0)


@dataclass(frozen=True)
class ImportJob:
    """One import: the file, the agent that was recorded, and the options.

    Args:
        path: The file to import.
        agent: The name under which the trajectories are stored as their model.
        scratch: A file that the reader may create; it is kept while the import is unfinished.
        redactor: Removes what must not be stored.
        labels: Which labels mean success and which failure.
        score: The only score that decides the outcome; None for all scores together.
        strict: Whether every bad record is reported before the first trajectory.
        redacts_fields: Whether fields are redacted by name, which works in valid JSON only.
    """

    path: Path
    agent: str
    scratch: Path
    redactor: Redactor
    labels: Labels
    score: str | None = None
    strict: bool = False
    redacts_fields: bool = False

    def clean(self, value: object) -> Any:
        """A JSON value with everything redacted that must not be stored."""
        return self.redactor.value(value) if self.redactor else value

    def clean_messages(self, value: object) -> Any:
        """Redact one message or several, or None, without changing the keys of the protocol."""
        return self.redactor.messages(value) if self.redactor else value

    def clean_tools(self, tools: list[Tool]) -> list[Tool]:
        """Redact tool definitions; the names of fields stay, because definitions hold no values."""
        cleaned: list[Tool] = self.redactor.definitions(tools) if self.redactor else tools
        return cleaned


@dataclass(frozen=True)
class Step:
    """The result of reading some records.

    ``passed`` counts valid records without a model call, ``size`` the approximate bytes. Reading resumes at
    ``resume_point`` once everything up to this step is stored; None where it cannot.
    """

    trajectories: Sequence[Trajectory] = ()
    good: int = 0
    passed: int = 0
    bad: BadRecord | None = None
    size: int = 0
    resume_point: ResumePoint | None = None


Reader = Callable[[ImportJob, ResumePoint | None], Iterator[Step]]


def records(
    job: ImportJob, position: FilePosition = FILE_START, key: str | None = None, *, keep_text: bool = True
) -> Iterator[Record | BadRecord]:
    """The records of a JSON Lines file or of a JSON array.

    Args:
        job: The import.
        position: Where an earlier read stopped.
        key: The member of the top-level object that holds the array; None where the array is the whole file.
        keep_text: Whether bad records keep their text, redacted.
    """
    for element in _elements(job.path, position, key):
        if isinstance(element, BadRecord):
            # Fields cannot be found in text that is not valid JSON, so such text is dropped as a whole.
            element.raw = job.redactor.text(element.raw) if keep_text and not job.redacts_fields else ""
        yield element


def _elements(path: Path, position: FilePosition, key: str | None) -> Iterator[Record | BadRecord]:
    head = read_head(path)
    if key is None and not is_array(head):
        yield from read_lines(path, position)
        return
    name = first_key(head, key)
    if name is None and key is None and not re.match(rb"\s*\[\s*\]", head.removeprefix(BOM_BYTES)):
        raise UnreadableFile(f"{path}: expected an array of objects", hint="traced import --help")
    yield from read_array(path, re.compile(r'\{\s*"' + re.escape(name or "") + r'"\s*:'), position, key)


def file_position(resume: ResumePoint | None) -> FilePosition:
    """The position in the file of a resume point; the beginning for None."""
    return FilePosition(**resume["file"]) if resume else FILE_START


def make_resume_point(position: FilePosition, **extra: object) -> ResumePoint:
    """The resume point at a position; ``extra`` is what the format needs besides."""
    return {"file": asdict(position), **extra}


def bad_record(job: ImportJob, record: Record, cause: str, *, keep_text: bool = True) -> BadRecord:
    """The error for a JSON value that is not a record of its format, with or without the redacted value."""
    raw = json.dumps(job.clean(record.value), ensure_ascii=False) if keep_text else ""
    return BadRecord(job.path, record.number, record.line, record.column, job.redactor.text(cause), raw=raw)


def outcome_of_value(value: object, labels: Labels) -> OutcomeReward | None:
    """The outcome that a boolean, a number from 0 to 1 or a label means; None for anything else."""
    if isinstance(value, bool):
        value = float(value)
    if isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1:
        return (Outcome.SUCCESS if value >= SUCCESS_THRESHOLD else Outcome.FAILURE), float(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word == Outcome.SUCCESS or word in {label.lower() for label in labels.success}:
            return Outcome.SUCCESS, 1.0
        if word == Outcome.FAILURE or word in {label.lower() for label in labels.failure}:
            return Outcome.FAILURE, 0.0
        if word == Outcome.INFRASTRUCTURE:
            return Outcome.INFRASTRUCTURE, 0.0
    return None


def outcome_of_scores(scores: Mapping[str, Sequence[Any]], job: ImportJob) -> OutcomeReward:
    """The outcome that several scores mean together, unknown where they disagree.

    Only ``job.score`` counts if it is set. The values of one score count by their mean.
    """
    outcomes: list[OutcomeReward] = []
    for name, values in scores.items():
        if job.score is None or name == job.score:
            parsed = [outcome for value in values if (outcome := outcome_of_value(value, job.labels)) is not None]
            # One report of an infrastructure failure is enough: the other scores rate a run that did not happen.
            if (Outcome.INFRASTRUCTURE, 0.0) in parsed:
                return Outcome.INFRASTRUCTURE, 0.0
            if parsed:
                mean = sum(reward for _, reward in parsed) / len(parsed)
                outcomes.append((Outcome.SUCCESS if mean >= SUCCESS_THRESHOLD else Outcome.FAILURE, mean))
    if len({outcome for outcome, _ in outcomes}) != 1:
        return UNKNOWN_OUTCOME
    return outcomes[0][0], sum(reward for _, reward in outcomes) / len(outcomes)


def trajectory(
    source: str,
    job: ImportJob,
    *,
    task_id: str,
    messages: list[Message],
    tools: list[Tool],
    judgement: OutcomeReward,
    trial: int = 0,
    detail: str = "",
) -> Trajectory:
    """An imported trajectory with an id made of its content."""
    task = storable(task_id)
    # The outcome is not part of the id: a later file may bring it for the same trajectory.
    return Trajectory(
        id=f"{source}-{digest([source, job.agent, task, trial, messages])[:32]}",
        source=source,
        split="",
        task_id=task,
        trial=trial,
        model=job.agent,
        temperature=0.0,
        messages=messages,
        tools=tools,
        turns=[],
        reward=judgement[1],
        outcome=judgement[0],
        end_cause=EndCause.IMPORTED,
        detail=detail,
    )


def storable(text: str) -> str:
    """Text that every database accepts as a key: bounded, without NUL and lone surrogates."""
    cleaned = replace_surrogates(text.replace("\0", "\ufffd"))
    return cleaned if len(cleaned) <= MAX_KEY_LENGTH else f"{cleaned[:160]}-{digest(text)[:32]}"


def text_size(messages: Sequence[Message]) -> int:
    """The number of characters in the contents of messages."""
    return sum(len(message["content"] or "") for message in messages)
