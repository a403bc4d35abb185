"""Traces of several calls of a model: collected from anywhere in a file, then put together one trace at a time.

The calls of a trace are put together as the router's exchanges are: a call whose messages begin with what the one
before ended with follows it, branches become trajectories of their own (``serving.gateway.branching``). A branch is
judged by what was said of its calls, failing that of the trace. A call that failed, and that asking the same again did
not make good, ends its branch: where the machinery failed (an error that clients raise for 429, 5xx, lost connections
and time-outs, by its name or status) the outcome is infrastructure, else what the scores say.

Invariants: traces need not be contiguous, so calls wait in a scratch database (``spill``), and memory holds one
trace; trajectories come in the order of the traces' keys. Bad records are told before the first trajectory. After a
kill reading goes on in whichever half it was.
Not covered: telling an agent's branch from those of the helpers it calls; conversations over several traces.

The calls of a trace export on their way to being put together, in a scratch database on disk.

Invariants: adding the same call or score twice leaves one, the later; what was committed survives a kill. Traces are
keyed by a hash of their ids, and everything else in it has been redacted before. It takes about as much disk as the
export does, and is removed once the import is done. Fails: ``sqlite3.Error`` where the disk is full.
"""

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from store.content import digest
from store.types import Message, Outcome, Tool, Trajectory
from traced.ingest.conversations import beginning, branches, position
from traced.ingest.importers.errors import BadRecord, Damage, ImportFailed
from traced.ingest.importers.reader import (
    NOT_KNOWN,
    Reading,
    Resume,
    Step,
    damaged,
    judge,
    judged,
    place_of,
    records,
    resume_at,
    storable,
    trajectory,
)

LONGEST_ERROR = 2000  # characters: the rest of it is a traceback
SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (trace TEXT, id TEXT, at TEXT, body TEXT, PRIMARY KEY (trace, id));
CREATE TABLE IF NOT EXISTS scores
    (trace TEXT, call TEXT, name TEXT, id TEXT, value TEXT, PRIMARY KEY (trace, call, name, id));
"""


@dataclass(frozen=True)
class Call:
    """One call of a model. ``trace`` groups; ``task`` is the trace's name as it may be stored; ``at`` sorts."""

    trace: str
    task: str
    id: str
    at: str
    messages: list[Message]
    answer: Message | None
    tools: list[Tool]
    error: str = ""


@dataclass(frozen=True)
class Score:
    """What somebody said of a call, or of its trace where ``call`` is "" (see ``traces.kept``)."""

    trace: str
    call: str
    name: str
    id: str
    value: Any


class Spill:
    """The scratch database in ``path``; made where it does not exist."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> "Spill":
        self._database = sqlite3.connect(self._path)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ImportFailed(f"{self._path}: {error}", hint="traced import --from-start") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        self._database.close()
        if isinstance(raised, sqlite3.Error):
            raise ImportFailed(f"{self._path}: {raised}", hint="make room on the disk, then the same again") from raised

    def add(self, parts: Sequence[Call | Score]) -> None:
        """Keep calls and scores."""
        for part in parts:
            trace = digest(part.trace)[:32]
            if isinstance(part, Call):
                body = {key: value for key, value in vars(part).items() if key not in ("trace", "id", "at")}
                self._put("calls", trace, digest(part.id)[:32], storable(part.at), json.dumps(body))
            else:
                call = digest(part.call)[:32] if part.call else ""
                self._put("scores", trace, call, storable(part.name), digest(part.id)[:32], json.dumps(part.value))

    def commit(self) -> None:
        """Let what was added survive a kill."""
        self._database.commit()

    def traces(self, after: str) -> Iterator[tuple[str, list[Call], list[Score]]]:
        """Every trace with calls behind ``after``: its key, its calls in the order of their times, its scores."""
        found = self._next(after)
        while found is not None:
            rows = self._database.execute("SELECT id, at, body FROM calls WHERE trace = ? ORDER BY at, id", (found,))
            calls = [Call(trace=found, id=key, at=at, **json.loads(body)) for key, at, body in rows]
            said = self._database.execute("SELECT * FROM scores WHERE trace = ? ORDER BY call, name, id", (found,))
            yield found, calls, [Score(found, call, name, key, json.loads(value)) for _, call, name, key, value in said]
            found = self._next(found)

    def _put(self, table: str, *values: str) -> None:
        marks = ", ".join("?" * len(values))
        self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)

    def _next(self, after: str) -> str | None:
        row = self._database.execute("SELECT min(trace) FROM calls WHERE trace > ?", (after,)).fetchone()
        return row[0] if row else None


TOGETHER = 4 << 20  # bytes that are read between two commits of the scratch database
MACHINERY = re.compile(
    r"RateLimit|APIConnection|APITimeout|InternalServer|ServiceUnavailable|Overloaded|BadGateway|GatewayTimeout"
    r"|Time(d )?out|Connect(ion)?Error|ConnectionReset|RemoteProtocolError|(error|status)( code)?\W{0,3}(429|5\d\d)\b",
    re.IGNORECASE,
)

Take = Callable[[Reading, Any], list[Call | Score]]


def read_traces(
    source: str, take: Take, reading: Reading, resume: Resume | None, key: str | None = None
) -> Iterator[Step]:
    """The trajectories of an export; ``take`` gives the calls and scores of one record and raises Damage."""
    with Spill(reading.scratch) as spill:
        done = resume.get("trace") if resume else None
        if done is None:
            yield from _collect(spill, take, reading, resume, key)
        for trace, calls, scores in spill.traces(after=done or ""):
            made = together(source, reading, calls, scores)
            size = sum(len(message["content"] or "") for one in made for message in one.messages)
            yield Step(made, size=size, place=resume_at(place_of(resume), trace=trace))


def _collect(spill: Spill, take: Take, reading: Reading, resume: Resume | None, key: str | None) -> Iterator[Step]:
    place = place_of(resume)
    kept = place.offset  # so far the scratch database holds everything
    for element in records(reading, place, key):
        if isinstance(element, BadRecord):
            yield Step(bad=element)
            continue
        try:
            parts = take(reading, element.value)
        except Damage as damage:
            yield Step(bad=damaged(reading, element, str(damage)))
            continue
        spill.add(parts)
        good = any(isinstance(part, Call) for part in parts)
        size = element.end.offset - kept
        if size >= TOGETHER:
            spill.commit()
            kept = element.end.offset
        whole = kept == element.end.offset
        yield Step(good=good, passed=not good, size=size * whole, place=resume_at(element.end) if whole else None)
    spill.commit()


def kept(reading: Reading, score: Score) -> Score:
    """A score as it may be kept: a value that judges nothing goes, and so does what a name must not hold."""
    name = score.name if score.name == reading.score else reading.redactor.name(score.name)
    return replace(score, name=name, value=score.value if judged(score.value, reading.labels) is not None else None)


def together(source: str, reading: Reading, calls: Sequence[Call], scores: Sequence[Score]) -> list[Trajectory]:
    """The trajectories of one trace; its calls in the order of their times."""
    answered = [(call, call.answer) for call in calls if call.answer is not None]
    said = [(call.messages, answer) for call, answer in answered]
    chains = [[answered[index][0] for index in branch] for branch in branches(said)]
    made_good = {position(call.messages) for call, _ in answered}
    failed = {key: call for call in calls if call.answer is None and (key := position(call.messages)) not in made_good}
    made = []
    for chain in chains:
        end = position(_conversation(chain[-1]))
        broke = next((key for key, call in failed.items() if beginning(call.messages) == end), None)
        made.append(_trajectory(source, reading, [*chain, *([failed.pop(broke)] if broke else [])], scores))
    return made + [_trajectory(source, reading, [call], scores) for call in failed.values()]


def _conversation(call: Call) -> list[Message]:
    return call.messages if call.answer is None else [*call.messages, call.answer]


def _trajectory(source: str, reading: Reading, chain: Sequence[Call], scores: Sequence[Score]) -> Trajectory:
    last = chain[-1]
    ids = {call.id for call in chain}
    of_calls = judge(_by_name(score for score in scores if score.call in ids), reading)
    of_trace = judge(_by_name(score for score in scores if not score.call), reading)
    judgement = of_calls if of_calls != NOT_KNOWN else of_trace
    if last.answer is None and MACHINERY.search(last.error):
        judgement = (Outcome.INFRASTRUCTURE, 0.0)
    return trajectory(
        source,
        reading,
        task_id=last.task,
        messages=_conversation(last),
        tools=next((call.tools for call in reversed(chain) if call.tools), []),
        judgement=judgement,
        detail=last.error if last.answer is None else "",
    )


def _by_name(scores: Iterator[Score]) -> dict[str, list[Any]]:
    named: dict[str, list[Any]] = {}
    for score in scores:
        named.setdefault(score.name, []).append(score.value)
    return named
