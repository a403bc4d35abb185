"""Trajectories as a person looks through them: a page of summaries at a time, filtered, with a bound on the work.

Invariants: pages come in the listing's order (``store.repositories.trajectories``), so that what is saved meanwhile
neither repeats nor hides a row of another page. A request reads at most ``LOOKED_AT`` rows and begins no further group
of them after ``PATIENCE_S``; a page that ends so says ``gave_up``, and ``after`` goes on from there. Text is looked for
in what the messages say, not in how they are stored; letters beyond ASCII are found as they were typed, in lower, in
upper and in title case. A label counts where at least one run of the cycle gave it; what one cycle has labelled is put
in the listing's order once per request, all of it.
How it fails: ``NotFound`` for a cursor that no page gave. Not covered: counting what fits; conversations of megabytes,
which each cost their reading once they are on a page.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Row, Text, and_, cast, func, or_, true, tuple_
from sqlmodel import Session, col, select

from store.errors import NotFound
from store.repositories.trajectories import ORDER
from store.tables import CapabilityRow, CycleRow, LabelRow, TrajectoryRow
from store.text import cases, stored
from store.types import EndCause, Message, Outcome, Verdict

LOOKED_AT = 10_000
GROUP = 250  # rows that are read at once while looking for what fits
PATIENCE_S = 0.5
WORDS = 200  # characters of the first user message
SUMMARISED = 50  # conversations in memory at a time
SHOWN = ("id", "source", "split", "task_id", "trial", "model", "outcome", "reward", "end_cause", "cycle_id", "messages")
COLUMNS = [col(getattr(TrajectoryRow, name)) for name in SHOWN]


@dataclass(frozen=True)
class Wanted:
    """Which trajectories; None and "" leave a property open. With ``cycle_id`` only what that cycle labelled.

    A capability and a verdict are of the cycle's labels, and need it.
    """

    outcome: Outcome | None = None
    source: str = ""
    text: str = ""
    cycle_id: str = ""
    capability: str = ""
    verdict: Verdict | None = None

    @property
    def labelled(self) -> bool:
        """Whether only what a cycle has labelled is wanted."""
        return bool(self.cycle_id or self.capability or self.verdict)


@dataclass(frozen=True)
class Summary:
    """A trajectory in a line; ``verdicts`` counts the runs that gave each, where a capability was asked for."""

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
    messages: int
    asked: str  # the first words of the user
    verdicts: dict[Verdict, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """Some rows, how many were looked at for them, and where to go on (None at the end)."""

    rows: list[Summary]
    next: str | None
    looked_at: int
    gave_up: bool


@dataclass(frozen=True)
class Labelled:
    """A cycle that has capabilities, and their names."""

    cycle_id: str
    capabilities: list[str]


def trajectory_page(session: Session, wanted: Wanted, *, limit: int, after: str | None = None) -> Page:
    """At most ``limit`` of them, behind the cursor of the page before."""
    begun, looked, found, at = time.monotonic(), 0, list[str](), after
    size = GROUP if wanted.outcome or wanted.text else limit
    labelled = _labelled(session, wanted, after, LOOKED_AT + size) if wanted.labelled else None
    while True:
        if labelled is None:
            group = _group(session, wanted, at, size)
        else:
            group, labelled = _judged(session, wanted, labelled[:size]), labelled[size:]
        for fits in _fitting(session, wanted, group):
            looked += 1
            at = fits[0]
            if fits[1]:
                found.append(at)
            if len(found) == limit:
                break
        ended = len(group) < size and (not group or at == group[-1].id)
        full = len(found) == limit
        gave_up = looked >= LOOKED_AT or time.monotonic() - begun > PATIENCE_S
        if ended or full or gave_up:
            rows = _summaries(session, wanted, found)
            return Page(rows, None if ended else at, looked, gave_up and not (ended or full))


def trials_of(session: Session, trajectory_id: str, *, limit: int) -> list[Summary]:
    """The other trajectories of the same task, in the listing's order; raises ``NotFound``."""
    row = session.get(TrajectoryRow, trajectory_id)
    if row is None:
        raise NotFound("trajectory", trajectory_id)
    same = {name: getattr(row, name) for name in ("source", "split", "task_id")}
    query = select(col(TrajectoryRow.id)).filter_by(**same).where(TrajectoryRow.id != trajectory_id)
    return _summaries(session, Wanted(), list(session.exec(query.order_by(*ORDER).limit(limit))))


def sources(session: Session, *, limit: int) -> list[str]:
    """The sources that there are, each found by one step in the listing's index."""
    found: list[str] = []
    while len(found) < limit:
        least = select(func.min(col(TrajectoryRow.source)))
        name = session.exec(least.where(col(TrajectoryRow.source) > found[-1]) if found else least).one()
        if name is None:
            break
        found.append(name)
    return found


def labelled_cycles(session: Session, *, limit: int) -> list[Labelled]:
    """The newest cycles that have capabilities, newest first."""
    chosen = select(CapabilityRow.cycle_id).where(col(CapabilityRow.cycle_id) == col(CycleRow.id)).exists()
    newest = select(CycleRow.id).where(chosen).order_by(col(CycleRow.created_at).desc(), col(CycleRow.id)).limit(limit)
    ids = list(session.exec(newest))
    names = select(CapabilityRow.cycle_id, CapabilityRow.name).where(col(CapabilityRow.cycle_id).in_(ids))
    by_cycle: dict[str, list[str]] = {key: [] for key in ids}
    for cycle_id, name in session.exec(names.order_by(col(CapabilityRow.name))):
        by_cycle[cycle_id].append(name)
    return [Labelled(key, found) for key, found in by_cycle.items()]


def labels_of(session: Session, trajectory_id: str) -> list[LabelRow]:
    """What every run of every cycle said of a trajectory, by cycle, capability and run."""
    order = (col(LabelRow.cycle_id), col(LabelRow.capability), col(LabelRow.run))
    return list(session.exec(select(LabelRow).where(LabelRow.trajectory_id == trajectory_id).order_by(*order)))


def _group(session: Session, wanted: Wanted, after: str | None, size: int) -> Sequence[Row[Any]]:
    """The next rows of the listing: their keys, and whether the database thinks that they fit."""
    query = select(col(TrajectoryRow.id), _fits(wanted).label("fits")).where(*_behind(session, wanted, after))
    return session.execute(query.order_by(*ORDER).limit(size)).all()


def _labelled(session: Session, wanted: Wanted, after: str | None, most: int) -> list[str]:
    """The next keys of the listing that the cycle has labelled so."""
    said = select(LabelRow.trajectory_id).where(*_label(session, wanted))
    if wanted.verdict:
        said = said.where(col(LabelRow.verdict) == wanted.verdict.value)
    query = select(TrajectoryRow.id).where(col(TrajectoryRow.id).in_(said), *_behind(session, wanted, after))
    return list(session.exec(query.order_by(*ORDER).limit(most)))


def _judged(session: Session, wanted: Wanted, ids: Sequence[str]) -> Sequence[Row[Any]]:
    """As ``_group``, of these."""
    query = select(col(TrajectoryRow.id), _fits(wanted).label("fits")).where(col(TrajectoryRow.id).in_(ids))
    rows = {row.id: row for row in session.execute(query)}
    return [rows[key] for key in ids]


def _behind(session: Session, wanted: Wanted, after: str | None) -> list[ColumnElement[bool]]:
    """What of the listing comes behind a row, of the source. Raises ``NotFound`` where there is no such row."""
    order = ORDER[1:] if wanted.source else ORDER  # with the source fixed, SQLite seeks only by what follows it
    chosen = [col(TrajectoryRow.source) == wanted.source] if wanted.source else []
    if after is None:
        return chosen
    place = session.exec(select(*order).where(TrajectoryRow.id == after)).first()
    if place is None:
        raise NotFound("trajectory", after, "take `after` from the page before")
    return [*chosen, tuple_(*order) > tuple_(*place)]


def _fits(wanted: Wanted) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = []
    if wanted.outcome:
        conditions.append(col(TrajectoryRow.outcome) == wanted.outcome.value)
    if wanted.text:
        names = (TrajectoryRow.id, TrajectoryRow.task_id, TrajectoryRow.model)
        said = [
            cast(TrajectoryRow.messages, Text).icontains(stored(form), autoescape=True) for form in cases(wanted.text)
        ]
        conditions.append(or_(*(col(name).icontains(wanted.text, autoescape=True) for name in names), *said))
    return and_(true(), *conditions)


def _label(session: Session, wanted: Wanted) -> list[ColumnElement[bool]]:
    """Which labels: by the beginning of their key, as far as it is known."""
    of_cycle = col(LabelRow.cycle_id) == wanted.cycle_id
    if not wanted.capability:
        return [of_cycle]
    first, last = (session.exec(select(end(LabelRow.run)).where(of_cycle)).one() for end in (func.min, func.max))
    runs = [] if first is None or last is None else range(first, last + 1)
    return [of_cycle, col(LabelRow.run).in_(runs), col(LabelRow.capability) == wanted.capability]


def _fitting(session: Session, wanted: Wanted, group: Sequence[Row[Any]]) -> Iterator[tuple[str, bool]]:
    """Every row of the group, and whether it fits; a text that stands only in JSON's own words does not."""
    unread = [row.id for row in group if row.fits] if wanted.text else []
    read: dict[str, bool] = {}
    for row in group:
        if wanted.text and row.fits and row.id not in read:
            read |= _saying(session, wanted, unread[:SUMMARISED])
            del unread[:SUMMARISED]
        yield row.id, read.get(row.id, bool(row.fits))


def _saying(session: Session, wanted: Wanted, ids: Sequence[str]) -> dict[str, bool]:
    columns = (TrajectoryRow.id, TrajectoryRow.task_id, TrajectoryRow.model, TrajectoryRow.messages)
    query = select(*columns).where(col(TrajectoryRow.id).in_(ids))
    text = wanted.text.casefold()
    return {
        key: any(text in one.casefold() for one in (key, task, model)) or any(text in one for one in _texts(messages))
        for key, task, model, messages in session.exec(query)
    }


def _texts(said: Any) -> Iterator[str]:
    """All texts in a message, in lower case: its keys are no part of what was said."""
    left = [said]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one.casefold()
        elif isinstance(one, dict):
            left += [value for key, value in one.items() if key not in ("role", "type")]
        elif isinstance(one, list):
            left += one


def _summaries(session: Session, wanted: Wanted, ids: Sequence[str]) -> list[Summary]:
    runs = _runs(session, wanted, ids)
    found: dict[str, Summary] = {}
    for start in range(0, len(ids), SUMMARISED):
        some = ids[start : start + SUMMARISED]
        for row in session.execute(select(*COLUMNS).where(col(TrajectoryRow.id).in_(some))).mappings():
            values = dict(row)
            messages = values.pop("messages")
            values |= {"outcome": Outcome(row["outcome"]), "end_cause": EndCause(row["end_cause"])}
            verdicts = dict(runs.get(row["id"], {}))
            asked = first_words(messages)
            found[row["id"]] = Summary(**values, messages=len(messages), asked=asked, verdicts=verdicts)
    return [found[key] for key in ids]


def _runs(session: Session, wanted: Wanted, ids: Sequence[str]) -> dict[str, Counter[Verdict]]:
    if not wanted.capability:
        return {}
    chosen = (*_label(session, wanted), col(LabelRow.trajectory_id).in_(ids))
    query = select(LabelRow.trajectory_id, LabelRow.verdict).where(*chosen)
    found: dict[str, Counter[Verdict]] = {}
    for key, verdict in session.exec(query):
        found.setdefault(key, Counter())[Verdict(verdict)] += 1
    return found


def first_words(messages: Sequence[Message]) -> str:
    """What the user said first, without its line ends; "" where no user speaks."""
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            said = (part.get("text") for part in parts if isinstance(part, dict))
            return " ".join(" ".join(text for text in said if isinstance(text, str))[: 2 * WORDS].split())[:WORDS]
    return ""
