"""Pages of trajectory summaries for display: filtered, in listing order, with a bound on the work per request.

A request examines at most ``MAX_SCANNED`` rows and starts no further batch after ``MAX_SCAN_S`` seconds. A page that
ends at one of these limits has ``gave_up`` set, and its cursor continues the search. The text filter searches ids, task
ids, models and the contents of messages, but not the keys of their JSON. A search text with letters beyond ASCII
matches as typed and in lower, upper and title case.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Row, Text, and_, cast, func, or_, true, tuple_
from sqlmodel import Session, col, select

from store.errors import NotFound
from store.repositories.trajectories import ORDER
from store.tables import CapabilityRow, CycleRow, LabelRow, TrajectoryRow
from store.text import case_variants, json_escaped
from store.types import EndCause, Message, Outcome, Verdict

MAX_SCANNED = 10_000
SCAN_SIZE = 250  # rows per query while searching for matches
MAX_SCAN_S = 0.5
MAX_FIRST_WORDS = 200  # characters of the first user message
MESSAGES_PER_QUERY = 50  # conversations in memory at a time
SUMMARY_COLUMNS = [
    col(getattr(TrajectoryRow, name))
    for name in (
        *("id", "source", "split", "task_id", "trial", "model"),
        *("outcome", "reward", "end_cause", "cycle_id", "started_at", "messages"),
    )
]


@dataclass(frozen=True)
class PageFilter:
    """Criteria for a page; None and "" match everything.

    With ``cycle_id`` only trajectories labelled by that cycle match; ``capability`` and ``verdict`` need it. A label
    counts if at least one run of the cycle gave it.
    """

    outcome: Outcome | None = None
    source: str = ""
    text: str = ""
    cycle_id: str = ""
    capability: str = ""
    verdict: Verdict | None = None

    @property
    def needs_labels(self) -> bool:
        """Whether only trajectories labelled by a cycle match."""
        return bool(self.cycle_id or self.capability or self.verdict)


@dataclass(frozen=True)
class Summary:
    """One row of a page; ``verdicts`` counts the labelling runs by verdict if the filter names a capability."""

    id: str
    source: str
    split: str
    task_id: str
    trial: int
    model: str
    outcome: Outcome
    reward: float
    end_cause: EndCause
    cycle_id: str | None
    started_at: datetime | None
    messages: int
    asked: str  # first words of the first user message
    verdicts: dict[Verdict, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """A page of summaries; ``next`` is the cursor of the next page, None at the end.

    ``looked_at`` is the number of rows examined; ``gave_up`` is true if the page ended early at the work limit.
    """

    rows: list[Summary]
    next: str | None
    looked_at: int
    gave_up: bool


@dataclass(frozen=True)
class CycleCapabilities:
    """A cycle and the names of its capabilities."""

    cycle_id: str
    capabilities: list[str]


def trajectory_page(session: Session, criteria: PageFilter, *, limit: int, after_id: str | None = None) -> Page:
    """Return a page of at most ``limit`` matching trajectories.

    Args:
        criteria: which trajectories match.
        limit: trajectories per page.
        after_id: ``Page.next`` of the previous page; raises ``NotFound`` if it is unknown.
    """
    started, scanned, ids, cursor = time.monotonic(), 0, list[str](), after_id
    size = SCAN_SIZE if criteria.outcome or criteria.text else limit
    labelled_ids = _labelled_ids(session, criteria, after_id, MAX_SCANNED + size) if criteria.needs_labels else None
    while True:
        if labelled_ids is None:
            group = _scan(session, criteria, cursor, size)
        else:
            group, labelled_ids = _scan_ids(session, criteria, labelled_ids[:size]), labelled_ids[size:]
        for cursor, is_match in _confirm_matches(session, criteria, group):
            scanned += 1
            if is_match:
                ids.append(cursor)
            if len(ids) == limit:
                break
        # A short group is the end of the listing only if all of its rows were examined.
        at_end = len(group) < size and (not group or cursor == group[-1].id)
        is_full = len(ids) == limit
        gave_up = scanned >= MAX_SCANNED or time.monotonic() - started > MAX_SCAN_S
        if at_end or is_full or gave_up:
            rows = _summaries(session, criteria, ids)
            return Page(rows, None if at_end else cursor, scanned, gave_up and not (at_end or is_full))


def trials_of(session: Session, trajectory_id: str, *, limit: int) -> list[Summary]:
    """Return at most ``limit`` other trajectories of the same task, in listing order; raises ``NotFound``."""
    row = session.get(TrajectoryRow, trajectory_id)
    if row is None:
        raise NotFound("trajectory", trajectory_id)
    same_task = {name: getattr(row, name) for name in ("source", "split", "task_id")}
    query = select(col(TrajectoryRow.id)).filter_by(**same_task).where(TrajectoryRow.id != trajectory_id)
    return _summaries(session, PageFilter(), list(session.exec(query.order_by(*ORDER).limit(limit))))


def sources(session: Session, *, limit: int) -> list[str]:
    """Return at most ``limit`` sources of all trajectories, in ascending order."""
    # One index seek per source; SELECT DISTINCT would scan the whole index.
    names: list[str] = []
    while len(names) < limit:
        smallest = select(func.min(col(TrajectoryRow.source)))
        name = session.exec(smallest.where(col(TrajectoryRow.source) > names[-1]) if names else smallest).one()
        if name is None:
            break
        names.append(name)
    return names


def labelled_cycles(session: Session, *, limit: int) -> list[CycleCapabilities]:
    """Return the newest ``limit`` cycles that have capabilities, newest first."""
    has_capabilities = select(CapabilityRow.cycle_id).where(col(CapabilityRow.cycle_id) == col(CycleRow.id)).exists()
    query = (
        select(CycleRow.id)
        .where(has_capabilities)
        .order_by(col(CycleRow.created_at).desc(), col(CycleRow.id))
        .limit(limit)
    )
    ids = list(session.exec(query))
    names = select(CapabilityRow.cycle_id, CapabilityRow.name).where(col(CapabilityRow.cycle_id).in_(ids))
    by_cycle: dict[str, list[str]] = {key: [] for key in ids}
    for cycle_id, name in session.exec(names.order_by(col(CapabilityRow.name))):
        by_cycle[cycle_id].append(name)
    return [CycleCapabilities(key, names_of_cycle) for key, names_of_cycle in by_cycle.items()]


def labels_of(session: Session, trajectory_id: str) -> list[LabelRow]:
    """Return all labels of a trajectory, ordered by cycle, capability and run."""
    order = (col(LabelRow.cycle_id), col(LabelRow.capability), col(LabelRow.run))
    return list(session.exec(select(LabelRow).where(LabelRow.trajectory_id == trajectory_id).order_by(*order)))


def first_words(messages: Sequence[Message]) -> str:
    """Return the first ``MAX_FIRST_WORDS`` characters of the first user message on one line; "" if there is none."""
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            texts = (part.get("text") for part in parts if isinstance(part, dict))
            text = " ".join(text for text in texts if isinstance(text, str))
            # Cut before splitting, because the text may be megabytes long.
            return " ".join(text[: 2 * MAX_FIRST_WORDS].split())[:MAX_FIRST_WORDS]
    return ""


def _scan(session: Session, criteria: PageFilter, cursor: str | None, size: int) -> Sequence[Row[Any]]:
    """Return the ids of the next rows in listing order, and whether each ``fits`` the criteria in the database."""
    query = select(col(TrajectoryRow.id), _matches_criteria(criteria).label("fits")).where(
        *_after_cursor(session, criteria, cursor)
    )
    return session.execute(query.order_by(*ORDER).limit(size)).all()


def _labelled_ids(session: Session, criteria: PageFilter, cursor: str | None, limit: int) -> list[str]:
    """Return the next ids, in listing order, of trajectories with a label that meets the criteria."""
    label_query = select(LabelRow.trajectory_id).where(*_label_conditions(session, criteria))
    if criteria.verdict:
        label_query = label_query.where(col(LabelRow.verdict) == criteria.verdict.value)
    query = select(TrajectoryRow.id).where(
        col(TrajectoryRow.id).in_(label_query), *_after_cursor(session, criteria, cursor)
    )
    return list(session.exec(query.order_by(*ORDER).limit(limit)))


def _scan_ids(session: Session, criteria: PageFilter, ids: Sequence[str]) -> Sequence[Row[Any]]:
    """Return the rows with these ids in this order, and whether each ``fits`` the criteria in the database."""
    query = select(col(TrajectoryRow.id), _matches_criteria(criteria).label("fits")).where(
        col(TrajectoryRow.id).in_(ids)
    )
    rows = {row.id: row for row in session.execute(query)}
    return [rows[key] for key in ids]


def _after_cursor(session: Session, criteria: PageFilter, cursor: str | None) -> list[ColumnElement[bool]]:
    """Return the conditions for rows of the source after the row ``cursor``; raises ``NotFound`` if there is none."""
    # If the source is fixed, SQLite seeks in the index only if the row comparison leaves the source out.
    order = ORDER[1:] if criteria.source else ORDER
    conditions = [col(TrajectoryRow.source) == criteria.source] if criteria.source else []
    if cursor is None:
        return conditions
    position = session.exec(select(*order).where(TrajectoryRow.id == cursor)).first()
    if position is None:
        raise NotFound("trajectory", cursor, "take `after` from the previous page")
    return [*conditions, tuple_(*order) > tuple_(*position)]


def _matches_criteria(criteria: PageFilter) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = []
    if criteria.outcome:
        conditions.append(col(TrajectoryRow.outcome) == criteria.outcome.value)
    if criteria.text:
        names = (TrajectoryRow.id, TrajectoryRow.task_id, TrajectoryRow.model)
        message_matches = [
            cast(TrajectoryRow.messages, Text).icontains(json_escaped(form), autoescape=True)
            for form in case_variants(criteria.text)
        ]
        conditions.append(
            or_(*(col(name).icontains(criteria.text, autoescape=True) for name in names), *message_matches)
        )
    return and_(true(), *conditions)


def _label_conditions(session: Session, criteria: PageFilter) -> list[ColumnElement[bool]]:
    """Return the conditions for labels of the cycle and capability of the criteria, with any verdict."""
    # The runs are listed so that the database can seek by (cycle, run, capability), the start of the primary key.
    of_cycle = col(LabelRow.cycle_id) == criteria.cycle_id
    if not criteria.capability:
        return [of_cycle]
    first, last = (session.exec(select(end(LabelRow.run)).where(of_cycle)).one() for end in (func.min, func.max))
    runs = [] if first is None or last is None else range(first, last + 1)
    return [of_cycle, col(LabelRow.run).in_(runs), col(LabelRow.capability) == criteria.capability]


def _confirm_matches(session: Session, criteria: PageFilter, group: Sequence[Row[Any]]) -> Iterator[tuple[str, bool]]:
    """Yield the id of every row and whether the row matches.

    The database searches the JSON text of messages, so it may match a key. The messages are read to confirm a match.
    """
    pending = [row.id for row in group if row.fits] if criteria.text else []
    text_matches: dict[str, bool] = {}
    for row in group:
        if criteria.text and row.fits and row.id not in text_matches:
            text_matches |= _text_matches(session, criteria, pending[:MESSAGES_PER_QUERY])
            del pending[:MESSAGES_PER_QUERY]
        yield row.id, text_matches.get(row.id, bool(row.fits))


def _text_matches(session: Session, criteria: PageFilter, ids: Sequence[str]) -> dict[str, bool]:
    columns = (TrajectoryRow.id, TrajectoryRow.task_id, TrajectoryRow.model, TrajectoryRow.messages)
    query = select(*columns).where(col(TrajectoryRow.id).in_(ids))
    text = criteria.text.casefold()
    return {
        key: any(text in value.casefold() for value in (key, task, model))
        or any(text in value for value in _texts(messages))
        for key, task, model, messages in session.exec(query)
    }


def _texts(content: object) -> Iterator[str]:
    """Yield all texts in messages, case-folded, without the keys and the values of ``role`` and ``type``."""
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value.casefold()
        elif isinstance(value, dict):
            pending += [value for key, value in value.items() if key not in ("role", "type")]
        elif isinstance(value, list):
            pending += value


def _summaries(session: Session, criteria: PageFilter, ids: Sequence[str]) -> list[Summary]:
    runs = _count_verdicts(session, criteria, ids)
    summaries: dict[str, Summary] = {}
    for start in range(0, len(ids), MESSAGES_PER_QUERY):
        batch = ids[start : start + MESSAGES_PER_QUERY]
        for row in session.execute(select(*SUMMARY_COLUMNS).where(col(TrajectoryRow.id).in_(batch))).mappings():
            values = dict(row)
            messages = values.pop("messages")
            values |= {"outcome": Outcome(row["outcome"]), "end_cause": EndCause(row["end_cause"])}
            verdicts = dict(runs.get(row["id"], {}))
            summaries[row["id"]] = Summary(
                **values, messages=len(messages), asked=first_words(messages), verdicts=verdicts
            )
    return [summaries[key] for key in ids]


def _count_verdicts(session: Session, criteria: PageFilter, ids: Sequence[str]) -> dict[str, Counter[Verdict]]:
    if not criteria.capability:
        return {}
    conditions = (*_label_conditions(session, criteria), col(LabelRow.trajectory_id).in_(ids))
    query = select(LabelRow.trajectory_id, LabelRow.verdict).where(*conditions)
    counts: dict[str, Counter[Verdict]] = {}
    for key, verdict in session.exec(query):
        counts.setdefault(key, Counter())[Verdict(verdict)] += 1
    return counts
