"""What every format's reader is given, what it gives back, and how records become outcomes and trajectories.

A reader yields ``Step``s in the file's order. Invariants: a step's ``place`` says where reading goes on once everything
up to it is stored, and a reader that is given it yields what it would have yielded behind it; steps without one are no
point to go on from. A strict reader yields every bad record before the first trajectory. Redaction is the readers':
what they yield may be stored as it is.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from store.content import digest
from store.text import in_unicode
from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.ingest.importers.errors import BadRecord, UnreadableFile
from traced.ingest.importers.json_file import (
    BEGINNING,
    Place,
    Record,
    beginning,
    first_key,
    is_array,
    read_array,
    read_lines,
)
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import Labels
from traced.scoring.rules import PASS

Resume = dict[str, Any]  # JSON
Judged = tuple[Outcome, float]

NOT_KNOWN: Judged = (Outcome.UNKNOWN, 0.0)


@dataclass(frozen=True)
class Reading:
    """One import: the file, whose trajectories they are, and the rules that apply."""

    path: Path
    agent: str
    scratch: Path  # a file that the reader may make; it is kept while the import is unfinished
    redactor: Redactor
    labels: Labels
    score: str | None = None  # the name of the score or feedback that judges
    strict: bool = False
    by_field: bool = False  # whether some of what must not be stored is known by the names of fields

    def clean(self, value: Any) -> Any:
        """A JSON value, a text among others, without what must not be stored."""
        return self.redactor.value(value) if self.redactor else value

    def clean_messages(self, value: Any) -> Any:
        """Messages, or one, that keep their form; None stays."""
        return self.redactor.messages(value) if self.redactor else value

    def clean_tools(self, tools: list[Tool]) -> list[Tool]:
        """Definitions of tools, which keep the names of fields."""
        cleaned: list[Tool] = self.redactor.definitions(tools) if self.redactor else tools
        return cleaned


@dataclass(frozen=True)
class Step:
    """What a stretch of the file gave. ``passed``: records that are in order and hold no call of a model."""

    trajectories: Sequence[Trajectory] = ()
    good: int = 0
    passed: int = 0
    bad: BadRecord | None = None
    size: int = 0  # bytes, roughly
    place: Resume | None = None


Reader = Callable[[Reading, Resume | None], Iterator[Step]]


def records(
    reading: Reading, place: Place = BEGINNING, key: str | None = None, *, keep: bool = True
) -> Iterator[Record | BadRecord]:
    """The records of a file of JSON Lines or of a JSON array, which with ``key`` is a member of an object.

    A bad one has its text, redacted, unless ``keep`` is False or fields cannot be told apart in what is no JSON.
    """
    for element in _elements(reading.path, place, key):
        if isinstance(element, BadRecord):
            element.raw = reading.redactor.text(element.raw) if keep and not reading.by_field else ""
        yield element


def _elements(path: Path, place: Place, key: str | None) -> Iterator[Record | BadRecord]:
    head = beginning(path)
    if key is None and not is_array(head):
        yield from read_lines(path, place)
        return
    name = first_key(head, key)
    if name is None and key is None and not re.match(rb"\s*\[\s*\]", head.removeprefix(b"\xef\xbb\xbf")):
        raise UnreadableFile(f"{path}: expected an array of objects", hint="traced import --help")
    yield from read_array(path, re.compile(r'\{\s*"' + re.escape(name or "") + r'"\s*:'), place, key)


def place_of(resume: Resume | None) -> Place:
    """The place in the file of a step's ``place``."""
    return Place(**resume["file"]) if resume else BEGINNING


def resume_at(place: Place, **more: Any) -> Resume:
    """A step's ``place``."""
    return {"file": asdict(place), **more}


def damaged(reading: Reading, record: Record, cause: str, *, keep: bool = True) -> BadRecord:
    """A record that is JSON and still none of its format; ``keep`` its content, redacted, or only its place."""
    raw = json.dumps(reading.clean(record.value), ensure_ascii=False) if keep else ""
    return BadRecord(reading.path, record.number, record.line, record.column, reading.redactor.text(cause), raw=raw)


def judged(value: Any, labels: Labels) -> Judged | None:
    """What a truth value, a number from 0 to 1 or a label says; None where it says nothing."""
    if isinstance(value, bool):
        value = float(value)
    if isinstance(value, int | float) and math.isfinite(value) and 0 <= value <= 1:
        return (Outcome.SUCCESS if value >= PASS else Outcome.FAILURE), float(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word == Outcome.SUCCESS or word in {label.lower() for label in labels.success}:
            return Outcome.SUCCESS, 1.0
        if word == Outcome.FAILURE or word in {label.lower() for label in labels.failure}:
            return Outcome.FAILURE, 0.0
        if word == Outcome.INFRASTRUCTURE:
            return Outcome.INFRASTRUCTURE, 0.0
    return None


def judge(scores: Mapping[str, Sequence[Any]], reading: Reading) -> Judged:
    """What scores say together: the named one alone if one is named, else all, unknown where they do not agree.

    Values of one name count by their mean; where one says that the machinery broke, it did.
    """
    said: list[Judged] = []
    for name, values in scores.items():
        if reading.score is None or name == reading.score:
            told = [one for value in values if (one := judged(value, reading.labels)) is not None]
            if (Outcome.INFRASTRUCTURE, 0.0) in told:
                return Outcome.INFRASTRUCTURE, 0.0
            if told:
                mean = sum(reward for _, reward in told) / len(told)
                said.append((Outcome.SUCCESS if mean >= PASS else Outcome.FAILURE, mean))
    if len({outcome for outcome, _ in said}) != 1:
        return NOT_KNOWN
    return said[0][0], sum(reward for _, reward in said) / len(said)


def trajectory(
    source: str,
    reading: Reading,
    *,
    task_id: str,
    messages: list[Message],
    tools: list[Tool],
    judgement: Judged,
    trial: int = 0,
    detail: str = "",
) -> Trajectory:
    """A trajectory whose id is its content's; a judgement is no part of it, so that one may come later."""
    task = storable(task_id)
    return Trajectory(
        id=f"{source}-{digest([source, reading.agent, task, trial, messages])[:32]}",
        source=source,
        split="",
        task_id=task,
        trial=trial,
        model=reading.agent,
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
    """Text that any database takes as a key: bounded, without NUL and halves of characters."""
    whole = in_unicode(text.replace("\0", "\ufffd"))
    return whole if len(whole) <= 200 else f"{whole[:160]}-{digest(text)[:32]}"
