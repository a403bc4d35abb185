"""Assemble trajectories from traced model calls, which may be in any order in an export.

First, calls are collected in a scratch database on disk, so that memory holds only one trace. Then each trace is split
into branches, and every branch becomes a trajectory. Its outcome comes from the scores of its calls, else from the
scores of the trace. Bad records are reported before the first trajectory, and an import that is killed in either phase
can be resumed. The scratch database takes about as much disk space as the export and holds only redacted content.

Not covered: distinguishing an agent's branch from those of its sub-agents; conversations over several traces.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from store.content import digest
from store.text import sanitize_line
from store.types import Message, Outcome, Tool, Trajectory
from traced.ingest.conversations import branches, position, start_position
from traced.ingest.importers.errors import BadRecord, RecordFormatError
from traced.ingest.importers.reader import (
    UNKNOWN_OUTCOME,
    ImportJob,
    NamedBy,
    ResumePoint,
    Step,
    bad_record,
    file_position,
    make_resume_point,
    outcome_of_scores,
    outcome_of_value,
    records,
    storable,
    text_size,
    time_of_value,
    trajectory,
    value_text,
)
from traced.ingest.importers.scratch import ScratchFile

# Maximum number of characters of an error; the rest of a long error is a traceback.
MAX_ERROR_LENGTH = 2000
# Bytes of the export between two commits of the scratch database.
COMMIT_BYTES = 4 << 20
# Matches the errors that clients raise for 429, 5xx, lost connections and timeouts, by name or status.
INFRASTRUCTURE_ERROR = re.compile(
    r"RateLimit|APIConnection|APITimeout|InternalServer|ServiceUnavailable|Overloaded|BadGateway|GatewayTimeout"
    r"|Time(d )?out|Connect(ion)?Error|ConnectionReset|RemoteProtocolError|(error|status)( code)?\W{0,3}(429|5\d\d)\b",
    re.IGNORECASE,
)
# Because of the primary keys, a resumed import may add a record a second time without effect.
SCHEMA = """
CREATE TABLE IF NOT EXISTS calls (trace TEXT, id TEXT, at TEXT, body TEXT, PRIMARY KEY (trace, id));
CREATE TABLE IF NOT EXISTS scores
    (trace TEXT, call TEXT, name TEXT, id TEXT, value TEXT, unread TEXT, PRIMARY KEY (trace, call, name, id));
"""


@dataclass(frozen=True)
class Call:
    """One model call.

    ``task`` is the redacted id of the call's trace, ``at`` a time stamp by which calls are sorted, ``answer`` is None
    for a failed call, and ``customer`` is the hash of the customer's name.
    """

    trace: str
    task: str
    id: str
    at: str
    messages: list[Message]
    answer: Message | None
    tools: list[Tool]
    error: str = ""
    customer: str = ""


@dataclass(frozen=True)
class Score:
    """A score of a model call, or of the whole trace if ``call`` is "".

    ``unread`` says its name and value, redacted, if the value is no outcome.
    """

    trace: str
    call: str
    name: str
    id: str
    value: Any
    unread: str = ""


RecordParser = Callable[[ImportJob, object], list[Call | Score]]


class ScratchDatabase(ScratchFile):
    """Keeps the calls and scores of an export on disk, grouped by trace."""

    SCHEMA = SCHEMA

    def add(self, parts: Sequence[Call | Score]) -> None:
        """Store calls and scores; one with the same ids replaces an earlier one."""
        for part in parts:
            trace = digest(part.trace)[:32]
            if isinstance(part, Call):
                body = {key: value for key, value in vars(part).items() if key not in ("trace", "id", "at")}
                self._put("calls", trace, digest(part.id)[:32], storable(part.at), json.dumps(body))
            else:
                call = digest(part.call)[:32] if part.call else ""
                value = json.dumps(part.value)
                self._put("scores", trace, call, storable(part.name), digest(part.id)[:32], value, part.unread)

    def traces(self, after_key: str) -> Iterator[tuple[str, list[Call], list[Score]]]:
        """Yield every trace with calls after ``after_key``: its key, its calls sorted by time, and its scores."""
        trace_key = self._next_trace(after_key)
        while trace_key is not None:
            rows = self._database.execute(
                "SELECT id, at, body FROM calls WHERE trace = ? ORDER BY at, id", (trace_key,)
            )
            calls = [Call(trace=trace_key, id=row_id, at=at, **json.loads(body)) for row_id, at, body in rows]
            score_rows = self._database.execute(
                "SELECT * FROM scores WHERE trace = ? ORDER BY call, name, id", (trace_key,)
            )
            scores = [
                Score(trace_key, call, name, row_id, json.loads(value), unread)
                for _, call, name, row_id, value, unread in score_rows
            ]
            yield trace_key, calls, scores
            trace_key = self._next_trace(trace_key)

    def _put(self, table: str, *values: str) -> None:
        placeholders = ", ".join("?" * len(values))
        self._database.execute(f"INSERT OR REPLACE INTO {table} VALUES ({placeholders})", values)

    def _next_trace(self, after_key: str) -> str | None:
        row = self._database.execute("SELECT min(trace) FROM calls WHERE trace > ?", (after_key,)).fetchone()
        return row[0] if row else None


def read_traces(
    source: str, parse: RecordParser, job: ImportJob, resume: ResumePoint | None, key: str | None = None
) -> Iterator[Step]:
    """Yield the bad records and then the trajectories of an export; raises ImportFailed.

    Args:
        source: The source that is stored with the trajectories.
        parse: Returns the redacted calls and scores of one record; raises RecordFormatError.
        job: The import.
        resume: The resume point where an earlier import stopped.
        key: The member of the top-level object that holds the records; None if the file holds only records.
    """
    with ScratchDatabase(job.scratch) as database:
        last_trace = resume.get("trace") if resume else None
        if last_trace is None:
            yield from _collect(database, parse, job, resume, key)
        for trace, calls, scores in database.traces(after_key=last_trace or ""):
            chains = _chains(calls)
            assembled = [_trajectory(source, job, chain, scores) for chain in chains]
            unread = [
                text
                for chain, trajectory in zip(chains, assembled, strict=True)
                if trajectory.outcome is Outcome.UNKNOWN and (text := _unread_outcome(job, chain, scores))
            ]
            size = sum(text_size(trajectory.messages) for trajectory in assembled)
            yield Step(
                assembled,
                named_by=NamedBy.TASK,
                unread=unread,
                size=size,
                resume_point=make_resume_point(file_position(resume), trace=trace),
            )


def _collect(
    database: ScratchDatabase, parse: RecordParser, job: ImportJob, resume: ResumePoint | None, key: str | None
) -> Iterator[Step]:
    start = file_position(resume)
    # The scratch database durably holds everything before this offset, so a killed import can resume only there.
    committed_offset = start.offset
    for element in records(job, start, key):
        if isinstance(element, BadRecord):
            yield Step(bad=element)
            continue
        try:
            parts = parse(job, element.value)
        except RecordFormatError as error:
            yield Step(bad=bad_record(job, element, str(error)))
            continue
        database.add(parts)
        has_call = any(isinstance(part, Call) for part in parts)
        size = element.end.offset - committed_offset
        if size >= COMMIT_BYTES:
            database.commit()
            committed_offset = element.end.offset
        is_committed = committed_offset == element.end.offset
        yield Step(
            good=has_call,
            passed=not has_call,
            size=size * is_committed,
            resume_point=make_resume_point(element.end) if is_committed else None,
        )
    database.commit()


def redacted_score(job: ImportJob, score: Score) -> Score:
    """Return a score with a redacted name, and with None instead of a value that is no outcome."""
    name = score.name if score.name == job.score else job.redactor.name(score.name)
    if outcome_of_value(score.value, job.labels) is not None:
        return replace(score, name=name)
    return replace(score, name=name, value=None, unread=value_text(job, score.name, score.value))


def assemble_trajectories(
    source: str, job: ImportJob, calls: Sequence[Call], scores: Sequence[Score]
) -> list[Trajectory]:
    """Return the trajectories of one trace, given its calls sorted by time."""
    return [_trajectory(source, job, chain, scores) for chain in _chains(calls)]


def _chains(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of each trajectory of a trace.

    There is one trajectory per branch, and one per failed call that neither was repeated with success nor continues a
    branch.
    """
    answered_calls = [(call, call.answer) for call in calls if call.answer is not None]
    exchanges = [(call.messages, answer) for call, answer in answered_calls]
    chains = [[answered_calls[index][0] for index in branch] for branch in branches(exchanges)]
    # A failed call that was repeated with success is ignored.
    answered_positions = {position(call.messages) for call, _ in answered_calls}
    failed = {
        key: call
        for call in calls
        if call.answer is None and (key := position(call.messages)) not in answered_positions
    }
    complete = []
    for chain in chains:
        # A failed call that continues this chain is its last call.
        end = position(_conversation(chain[-1]))
        failed_position = next((key for key, call in failed.items() if start_position(call.messages) == end), None)
        ending = [failed.pop(failed_position)] if failed_position else []
        complete.append([*chain, *ending])
    return complete + [[call] for call in failed.values()]


def _unread_outcome(job: ImportJob, chain: Sequence[Call], scores: Sequence[Score]) -> str:
    """Return why the scores of a trajectory give no outcome, "" if it has none."""
    ids = {"", *(call.id for call in chain)}
    relevant = [score for score in scores if score.call in ids and job.score in (None, score.name)]
    names = sorted({score.name for score in relevant if score.value is not None})
    if names:
        return sanitize_line(f"scores that disagree: {', '.join(names)} (--score NAME picks one)")
    return next((score.unread for score in relevant if score.unread), "")


def _conversation(call: Call) -> list[Message]:
    return call.messages if call.answer is None else [*call.messages, call.answer]


def _trajectory(source: str, job: ImportJob, chain: Sequence[Call], scores: Sequence[Score]) -> Trajectory:
    last = chain[-1]
    ids = {call.id for call in chain}
    of_calls = outcome_of_scores(_by_name(score for score in scores if score.call in ids), job)
    of_trace = outcome_of_scores(_by_name(score for score in scores if not score.call), job)
    judgement = of_calls if of_calls != UNKNOWN_OUTCOME else of_trace
    if last.answer is None and INFRASTRUCTURE_ERROR.search(last.error):
        judgement = (Outcome.INFRASTRUCTURE, 0.0)
    return trajectory(
        source,
        job,
        task_id=last.task,
        messages=_conversation(last),
        tools=next((call.tools for call in reversed(chain) if call.tools), []),
        judgement=judgement,
        detail=last.error if last.answer is None else "",
        customer=next((call.customer for call in chain if call.customer), ""),
        started_at=time_of_value(chain[0].at),
    )


def _by_name(scores: Iterator[Score]) -> dict[str, list[Any]]:
    values_by_name: dict[str, list[Any]] = {}
    for score in scores:
        values_by_name.setdefault(score.name, []).append(score.value)
    return values_by_name
