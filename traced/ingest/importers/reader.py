"""The input and output types of all format readers, and the conversion of records to outcomes and trajectories.

A reader yields ``Step``s in the order of the file and can resume from the resume point of any step. In a strict import
a reader yields every bad record before the first trajectory. Readers redact, so their output may be stored unchanged.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any

from store.content import digest
from store.text import replace_surrogates, sanitize_line
from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.ingest.customers import CustomerHash
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
from traced.targets.conversation_target import ConversationTarget

# JSON from which a reader resumes: the position in the file, and further data that the format needs.
ResumePoint = dict[str, Any]
OutcomeReward = tuple[Outcome, float]

MAX_KEY_LENGTH = 200
NO_TARGET = ConversationTarget("")
# The hexadecimal digits at the end of an id that depend on the content, where the digits before name the conversation.
CONTENT_DIGITS = 16
# Fields of a record, or of its metadata, that name the customer.
CUSTOMER_FIELDS = ("customer", "customer_id", "user_id", "userId", "user", "end_user_id")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A time in the year 2242; later time stamps are in other units.
MAX_TIMESTAMP_S = 2**33
UNKNOWN_OUTCOME: OutcomeReward = (Outcome.UNKNOWN, 0.0)
# A number as text. Not float() alone, which also accepts "nan", "1_0" and the digits of other scripts.
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)
# Maximum number of characters of an outcome that could not be read.
MAX_UNREAD_LENGTH = 60


@dataclass(frozen=True)
class ImportJob:
    """One import: the file, the recorded agent, and the options.

    Args:
        path: The file to import.
        agent: The name that is stored as the trajectories' model.
        scratch: A file that the reader may create; it is kept while the import is unfinished.
        redactor: Redacts messages, tools and other values.
        labels: The labels that mean success or failure.
        score: The name of the only score that decides the outcome; None for all scores together.
        strict: Whether every bad record is reported before the first trajectory.
        redacts_fields: Whether fields are redacted by name, which works in valid JSON only.
        target: The target of the conversations, which gives them their split; by default none.
        customers: Hashes the names of customers; None: they are not read.
    """

    path: Path
    agent: str
    scratch: Path
    redactor: Redactor
    labels: Labels
    score: str | None = None
    strict: bool = False
    redacts_fields: bool = False
    target: ConversationTarget = NO_TARGET
    customers: CustomerHash | None = None

    def customer(self, fields: Mapping[str, Any], names: Sequence[str]) -> str:
        """Return the hash of the first customer's name in these fields, "" without one."""
        return self.customers.first(fields, names) if self.customers is not None else ""

    def clean(self, value: object) -> Any:
        """Return a redacted copy of a JSON value."""
        return self.redactor.value(value) if self.redactor else value

    def clean_messages(self, value: object) -> Any:
        """Return redacted copies of one message, several, or None, without changes to the protocol's fields."""
        return self.redactor.messages(value) if self.redactor else value

    def clean_tools(self, tools: list[Tool]) -> list[Tool]:
        """Return redacted tool definitions; fields are kept, because definitions hold names of fields but no values."""
        cleaned: list[Tool] = self.redactor.definitions(tools) if self.redactor else tools
        return cleaned


class NamedBy(Enum):
    """What names the conversation of an imported trajectory."""

    NOTHING = auto()
    # Its task and trial.
    TASK = auto()
    # The first part of the trajectory's id: its task is shared with other conversations.
    ID = auto()


@dataclass(frozen=True)
class Step:
    """The result of reading some records.

    ``good`` counts valid records with a model call, ``passed`` those without, and ``size`` the approximate bytes.
    ``unread`` has, for each trajectory whose outcome could not be read, the field and its value as redacted text.
    ``named_by`` says what names the conversation of each trajectory.
    Reading can resume at ``resume_point`` once everything up to this step is stored; None if it cannot resume here.
    """

    trajectories: Sequence[Trajectory] = ()
    named_by: NamedBy = NamedBy.NOTHING
    good: int = 0
    passed: int = 0
    bad: BadRecord | None = None
    unread: Sequence[str] = ()
    size: int = 0
    resume_point: ResumePoint | None = None


Reader = Callable[[ImportJob, ResumePoint | None], Iterator[Step]]


def records(
    job: ImportJob, position: FilePosition = FILE_START, key: str | None = None, *, keep_text: bool = True
) -> Iterator[Record | BadRecord]:
    """Yield the records of a JSON Lines file or of a JSON array; raises UnreadableFile.

    Args:
        job: The import.
        position: The position where an earlier read stopped.
        key: The member of the top-level object that holds the array; None if the array is the whole file.
        keep_text: Whether bad records keep their redacted text.
    """
    for element in _elements(job.path, position, key):
        if isinstance(element, BadRecord):
            # Fields cannot be found in text that is not valid JSON, so the whole text is dropped.
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
    """Return the position in the file of a resume point; the beginning of the file for None."""
    return FilePosition(**resume["file"]) if resume else FILE_START


def make_resume_point(position: FilePosition, **extra: object) -> ResumePoint:
    """Return the resume point at a position; ``extra`` is further data that the format needs to resume."""
    return {"file": asdict(position), **extra}


def bad_record(job: ImportJob, record: Record, cause: str, *, keep_text: bool = True) -> BadRecord:
    """Return the error for a JSON value that is not a record of its format, with or without the redacted value."""
    raw = json.dumps(job.clean(record.value), ensure_ascii=False) if keep_text else ""
    return BadRecord(job.path, record.number, record.line, record.column, job.redactor.text(cause), raw=raw)


def outcome_of_value(value: object, labels: Labels) -> OutcomeReward | None:
    """Return the outcome and reward that a boolean, a number from 0 to 1 or a label means; None for other values.

    A label precedes a number that is written as text.
    """
    if isinstance(value, str):
        word = value.strip().lower()
        if word == Outcome.SUCCESS or word in {label.lower() for label in labels.success}:
            return Outcome.SUCCESS, 1.0
        if word == Outcome.FAILURE or word in {label.lower() for label in labels.failure}:
            return Outcome.FAILURE, 0.0
        if word == Outcome.INFRASTRUCTURE:
            return Outcome.INFRASTRUCTURE, 0.0
        value = float(word) if NUMBER.fullmatch(word) else None
    if isinstance(value, int | float) and 0 <= value <= 1:
        return (Outcome.SUCCESS if value >= SUCCESS_THRESHOLD else Outcome.FAILURE), float(value)
    return None


def value_text(job: ImportJob, name: str, value: object) -> str:
    """Return a field and its value as redacted, bounded text; "" if the value is empty or says "unknown"."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", Outcome.UNKNOWN)):
        return ""
    # A field of this name may be one to redact, and its name may hold a match as well.
    [(redacted_name, redacted_value)] = job.clean({name: value}).items()
    text = json.dumps(redacted_value, ensure_ascii=False)
    return sanitize_line(f"{job.redactor.text(redacted_name)} {text}", MAX_UNREAD_LENGTH)


def outcome_of_scores(scores: Mapping[str, Sequence[Any]], job: ImportJob) -> OutcomeReward:
    """Return the outcome and reward that several scores mean together; unknown if the scores disagree.

    If ``job.score`` is set, only this score is used. Several values of one score are replaced by their mean.
    """
    outcomes: list[OutcomeReward] = []
    for name, values in scores.items():
        if job.score is None or name == job.score:
            parsed = [outcome for value in values if (outcome := outcome_of_value(value, job.labels)) is not None]
            # One report of an infrastructure failure is sufficient: other scores then rate a run that did not happen.
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
    customer: str = "",
    started_at: datetime | None = None,
    is_shared_task: bool = False,
    name: str = "",
) -> Trajectory:
    """Return an imported trajectory, whose id is derived from its content.

    Args:
        customer: The hash of its customer's name.
        name: Its name among the conversations of the task, if it has one: two may have the same words.
        is_shared_task: Whether several customers may have the task; else its id names this conversation.
    """
    task = storable(task_id)
    # The outcome is not part of the id, because a later file may state it for the same trajectory.
    key = digest([source, job.agent, task, trial, messages, *([name] if name else [])])
    if name:
        key = digest([source, job.agent, task, trial, name])[:CONTENT_DIGITS] + key[:CONTENT_DIGITS]
    return Trajectory(
        id=f"{source}-{key[:32]}",
        source=source,
        split=job.target.split(task, customer=customer, task=task if is_shared_task else ""),
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
        customer=customer,
        started_at=started_at,
    )


def time_of_value(value: object) -> datetime | None:
    """Return the time that a value of a record means: ISO 8601 (UTC without a zone), or Unix seconds; None if none."""
    try:
        if isinstance(value, str):
            time = datetime.fromisoformat(value)
            return time.replace(tzinfo=UTC) if time.tzinfo is None else time.astimezone(UTC)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < MAX_TIMESTAMP_S:
            return EPOCH + timedelta(seconds=value)
    except (ValueError, OverflowError):
        pass
    return None


def storable(text: str) -> str:
    """Return the text in a form that every database accepts as a key: bounded, without NUL and lone surrogates."""
    cleaned = replace_surrogates(text.replace("\0", "\ufffd"))
    return cleaned if len(cleaned) <= MAX_KEY_LENGTH else f"{cleaned[:160]}-{digest(text)[:32]}"


def text_size(messages: Sequence[Message]) -> int:
    """Return the number of characters in the contents of messages."""
    return sum(len(message["content"] or "") for message in messages)
