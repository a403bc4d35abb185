"""The router's traffic for a person to look at: what became of one conversation, and what one model was given.

Invariants: read only; the bodies of exchanges are not read (their trajectories have the messages).
Fails: ``NotFound`` for a conversation that the router never had. Not covered: all models of late
(``store.repositories.traffic``).

What the router did of late, by model, and its newest decisions, page by page.

Invariants: read only, and few rows however many there are: of the last day at most the newest ``MOST`` exchanges that
wait and as many that are settled, by an index, of which the newest ``MOST`` count (``partial`` says that there may be
more); the outcomes of the newest ``MOST_JUDGED`` trajectories that these became; the newest ``MOST_FEEDBACK`` pieces of
feedback. What answered in the shadow is no model's conversation. A page of decisions is in the order of writing on
SQLite, whose row numbers say it; PostgreSQL has no index for it and sorts all decisions that are kept by their time.
Fails: ``NotFound`` for a cursor that no page of this database gave. Not covered: shares over all time
(``repositories.traffic``).
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import SQLColumnExpression, literal_column, tuple_
from sqlalchemy import select as sql_select
from sqlmodel import Session, col, func, select

from store.errors import NotFound
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories.serving import (
    IDS_PER_QUERY,
    conversation_of,
    find_routes,
    list_exchanges,
    list_feedback,
    trajectories_of,
)
from store.repositories.trajectories import get_trajectories
from store.service_tables import ConversationRow, ExchangeRow, FeedbackRow
from store.tables import TrajectoryRow
from store.types import EndCause, Outcome, Trajectory


@dataclass(frozen=True)
class Conversation:
    """One conversation of the router's; ``route`` is None where nothing was decided (a model was asked for by name)."""

    id: str
    route: ConversationRoute | None
    exchanges: list[Exchange]
    feedback: list[Feedback]
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class Served:
    """What the router has given a model: so many of all the conversations that it decided, the last one when.

    ``outcomes`` are those of the trajectories that the model's conversations have become, by what feedback says.
    """

    conversations: int
    decided: int
    last: datetime | None
    outcomes: dict[Outcome, int]

    @property
    def share(self) -> float | None:
        """The model's part of the decided conversations, 0-1; None before the first one."""
        return self.conversations / self.decided if self.decided else None


def get_conversation(session: Session, named: str) -> Conversation:
    """The conversation of this id, or the one in which an answer of this id was given; raises ``NotFound``."""
    for found in (named, conversation_of(session, named)):
        if found is None:
            continue
        route = find_routes(session, [found]).get(found)
        exchanges = list_exchanges(session, found, bodies=False)
        if route is not None or exchanges:
            return Conversation(
                found,
                route,
                exchanges,
                list_feedback(session, [found]),
                get_trajectories(session, trajectories_of(session, found), tokens=False),
            )
    hint = "it is in the header X-Traced-Conversation of every answer, and kept for retention.conversations_days"
    raise NotFound("conversation", named, hint)


def served(session: Session, model: str) -> Served:
    """What the router has given ``model`` so far, as far as it is kept."""
    own = select(func.count(), func.max(ConversationRow.at)).where(ConversationRow.model == model)
    conversations, last = session.exec(own).one()
    decided = session.exec(select(func.count()).select_from(ConversationRow)).one()
    outcome = col(TrajectoryRow.outcome)
    seen = (col(TrajectoryRow.cycle_id).is_(None), TrajectoryRow.end_cause != EndCause.SHADOW.value)
    chosen = select(outcome, func.count()).where(TrajectoryRow.model == model, *seen)
    rows = session.exec(chosen.group_by(outcome).order_by(outcome))
    return Served(conversations, decided, last, {Outcome(name): count for name, count in rows})


OK = 200
MOST, MOST_JUDGED, MOST_FEEDBACK = 10_000, 1_000, 1_000
REASONS = 5


@dataclass
class ModelLately:
    """What one model did in the last day.

    ``hour``, ``day`` and ``shadowed`` are conversations, ``seconds`` those of the requests that it answered, rising;
    ``failures`` requests by status. ``outcomes`` and ``feedback`` are of conversations that it answered in.
    """

    model: str
    hour: int = 0
    day: int = 0
    shadowed: int = 0
    requests: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: dict[int, int] = field(default_factory=dict)
    outcomes: dict[Outcome, int] = field(default_factory=dict)
    feedback: list[Feedback] = field(default_factory=list)

    def within(self, part: float) -> float | None:
        """The seconds within which this part of the answers came; None without any."""
        return self.seconds[max(math.ceil(part * len(self.seconds)) - 1, 0)] if self.seconds else None


@dataclass(frozen=True)
class Lately:
    """All models of the last day by name, and why conversations were left to the base model, the commonest first."""

    models: dict[str, ModelLately]
    by_default: dict[str, int]
    partial: bool


@dataclass(frozen=True)
class Decisions:
    """A page of decisions, newest first; ``next`` is the cursor of the one behind it, None where there is none."""

    decisions: list[ConversationRoute]
    next: str | None


class _Seen(NamedTuple):
    """One exchange, without what was said."""

    at: datetime
    conversation_id: str
    model: str
    status: int
    seconds: float
    trajectory_id: str | None
    shadow_of: str | None


def lately(session: Session, now: datetime) -> Lately:
    """The last day of ``now``."""
    day, hour = now - timedelta(days=1), now - timedelta(hours=1)
    seen = _seen(session, day)
    models: dict[str, ModelLately] = {}
    failures: dict[str, Counter[int]] = {}
    for one in seen:
        found = models.setdefault(one.model, ModelLately(one.model))
        found.requests += 1
        if one.status == OK:
            found.seconds.append(one.seconds)
        else:
            failures.setdefault(one.model, Counter())[one.status] += 1
    for model, counted in failures.items():
        models[model].failures = dict(sorted(counted.items()))
    for found in models.values():
        found.seconds.sort()
    shown = [one for one in seen if one.shadow_of is None]
    for model, count in _conversations(shown).items():
        models[model].day = count
    for model, count in _conversations([one for one in shown if one.at > hour]).items():
        models[model].hour = count
    for model, count in _conversations([one for one in seen if one.shadow_of is not None]).items():
        models[model].shadowed = count
    _judge(session, shown, models)
    _hear(session, day, models)
    return Lately(dict(sorted(models.items())), _by_default(session, shown, day), len(seen) >= MOST)


def decisions(session: Session, *, limit: int, before: str | None = None, model: str = "") -> Decisions:
    """The newest decisions, newest first: behind the cursor ``before``, and of one ``model``."""
    by_row = session.get_bind().dialect.name == "sqlite"
    at, key = col(ConversationRow.at), col(ConversationRow.id)
    number: SQLColumnExpression[Any] = literal_column("conversations.rowid") if by_row else at
    query = sql_select(ConversationRow, number).order_by(number.desc(), key.desc()).limit(limit + 1)
    if model:
        query = query.where(col(ConversationRow.model) == model)
    if before is not None:
        query = query.where(number < _row(before) if by_row else tuple_(at, key) < tuple_(*_moment(before)))
    rows = session.execute(query).all()
    found = [ConversationRoute(**row.model_dump()) for row, _ in rows[:limit]]
    if len(rows) <= limit:
        return Decisions(found, None)
    last, place = rows[limit - 1]
    return Decisions(found, str(place) if by_row else f"{last.at.isoformat()} {last.id}")


def _row(cursor: str) -> int:
    """Where SQLite's cursor points to."""
    if not re.fullmatch(r"[0-9]{1,18}", cursor):
        raise _no_page(cursor)
    return int(cursor)


def _moment(cursor: str) -> tuple[datetime, str]:
    """Where PostgreSQL's cursor points to."""
    at, _, name = cursor.partition(" ")
    try:
        return datetime.fromisoformat(at).astimezone(UTC), name
    except (ValueError, OverflowError) as error:
        raise _no_page(cursor) from error


def _no_page(cursor: str) -> NotFound:
    return NotFound("page of decisions behind", cursor, "take `before` from the page before")


def _seen(session: Session, since: datetime) -> list[_Seen]:
    """The newest exchanges, newest first: one is settled after it was made."""
    parts = [col(getattr(ExchangeRow, name)) for name in _Seen._fields]
    at, settled = col(ExchangeRow.at), col(ExchangeRow.settled_at)
    query = sql_select(*parts).where(at > since).limit(MOST)
    waiting = session.execute(query.where(settled.is_(None)).order_by(at.desc()))
    rows = [_Seen(*row) for row in waiting]
    rows += [_Seen(*row) for row in session.execute(query.where(settled > since).order_by(settled.desc()))]
    return sorted(rows, key=lambda one: one.at, reverse=True)[:MOST]


def _conversations(seen: Sequence[_Seen]) -> Counter[str]:
    pairs = {(one.model, one.conversation_id) for one in seen}
    return Counter(model for model, _ in pairs)


def _judge(session: Session, seen: Sequence[_Seen], models: dict[str, ModelLately]) -> None:
    """Count the outcomes of what the newest of these became, for every model that answered in it."""
    became: dict[str, set[str]] = {}
    for one in seen:
        if one.trajectory_id is not None and (len(became) < MOST_JUDGED or one.trajectory_id in became):
            became.setdefault(one.trajectory_id, set()).add(one.model)
    for ids in _batches(list(became)):
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(col(TrajectoryRow.id).in_(ids))
        for key, told in session.exec(query):
            for model in became[key]:
                outcomes, outcome = models[model].outcomes, Outcome(told)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1


def _hear(session: Session, since: datetime, models: dict[str, ModelLately]) -> None:
    """Give every model the feedback on conversations that it answered in."""
    query = select(FeedbackRow).order_by(col(FeedbackRow.seq).desc()).limit(MOST_FEEDBACK)
    said = [row for row in session.exec(query) if row.at > since]
    answered: dict[str, set[str]] = {}
    parts = (ExchangeRow.conversation_id, ExchangeRow.model)
    for ids in _batches(list({row.conversation_id for row in said})):
        chosen = (col(ExchangeRow.conversation_id).in_(ids), col(ExchangeRow.shadow_of).is_(None))
        for conversation_id, model in session.exec(select(*parts).where(*chosen).distinct()):
            answered.setdefault(conversation_id, set()).add(model)
    for row in said:
        for model in answered.get(row.conversation_id, ()):
            heard = Feedback(**row.model_dump(exclude={"seq", "id"}))
            models.setdefault(model, ModelLately(model)).feedback.append(heard)


def _by_default(session: Session, seen: Sequence[_Seen], since: datetime) -> dict[str, int]:
    """Why base was given; conversations of other models had a decision of its own."""
    counted: Counter[str] = Counter()
    for ids in _batches(list({one.conversation_id for one in seen})):
        chosen = (col(ConversationRow.id).in_(ids), ConversationRow.why != "", ConversationRow.at > since)
        counted.update(session.exec(select(ConversationRow.why).where(*chosen)))
    return dict(sorted(counted.items(), key=lambda one: (-one[1], one[0]))[:REASONS])


def _batches(ids: Sequence[str]) -> Collection[Sequence[str]]:
    return [ids[start : start + IDS_PER_QUERY] for start in range(0, len(ids), IDS_PER_QUERY)]
