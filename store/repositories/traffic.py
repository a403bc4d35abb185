"""Read-only views of the router's traffic: one conversation, one model, the last day, and pages of decisions.

``MAX_EXCHANGES``, ``MAX_OUTCOMES`` and ``MAX_FEEDBACK`` bound the rows read for the last day, however much is stored.
Bodies of exchanges are never read.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import SQLColumnExpression, literal_column, tuple_
from sqlalchemy import select as sql_select
from sqlmodel import Session, col, func, select

from store.content import batches
from store.errors import NotFound
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories.serving import (
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

OK = 200
MAX_EXCHANGES, MAX_OUTCOMES, MAX_FEEDBACK = 10_000, 1_000, 1_000
MAX_REASONS = 5


@dataclass(frozen=True)
class Conversation:
    """A conversation of the router; ``route`` is None if the client named the model itself."""

    id: str
    route: ConversationRoute | None
    exchanges: list[Exchange]
    feedback: list[Feedback]
    trajectories: list[Trajectory]


@dataclass(frozen=True)
class ModelTraffic:
    """The traffic of one model over all time.

    ``conversations`` counts the conversations routed to the model, ``decided`` those routed to any model. ``last`` is
    the time of the newest decision for the model. ``outcomes`` counts the model's production trajectories by outcome.
    """

    conversations: int
    decided: int
    last: datetime | None
    outcomes: dict[Outcome, int]

    @property
    def share(self) -> float | None:
        """The model's share of the routed conversations, 0-1; None if no conversation was routed."""
        return self.conversations / self.decided if self.decided else None


@dataclass
class ModelActivity:
    """The activity of one model in the last day.

    ``hour``, ``day`` and ``shadowed`` count conversations of the last hour, the last day, and those in which the model
    was the shadow. ``seconds`` are the sorted latencies of answered requests; ``failures`` counts failed requests by
    HTTP status. ``outcomes`` and ``feedback`` belong to conversations in which the model handled a request.
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

    def latency_quantile(self, quantile: float) -> float | None:
        """Return the latency (seconds) at a quantile in [0, 1]; None without answered requests."""
        return self.seconds[max(math.ceil(quantile * len(self.seconds)) - 1, 0)] if self.seconds else None


@dataclass(frozen=True)
class RecentTraffic:
    """The activity of the last day by model.

    ``by_default`` counts the conversations that fell back to the base model by reason: the ``MAX_REASONS`` most
    frequent, in descending order. ``partial`` is true if there may be more exchanges than were read.
    """

    models: dict[str, ModelActivity]
    by_default: dict[str, int]
    partial: bool


@dataclass(frozen=True)
class RoutePage:
    """A page of routing decisions, newest first; ``next`` is the cursor of the next page, None at the end."""

    decisions: list[ConversationRoute]
    next: str | None


class _ExchangeHeader(NamedTuple):
    """An exchange without its body."""

    at: datetime
    conversation_id: str
    model: str
    status: int
    seconds: float
    trajectory_id: str | None
    shadow_of: str | None


def get_conversation(session: Session, name: str) -> Conversation:
    """Return a conversation by its id or by the id of a response in it; raises ``NotFound``."""
    for conversation_id in (name, conversation_of(session, name)):
        if conversation_id is None:
            continue
        route = find_routes(session, [conversation_id]).get(conversation_id)
        exchanges = list_exchanges(session, conversation_id, bodies=False)
        if route is not None or exchanges:
            return Conversation(
                conversation_id,
                route,
                exchanges,
                list_feedback(session, [conversation_id]),
                get_trajectories(session, trajectories_of(session, conversation_id), tokens=False),
            )
    hint = "it is in the header X-Traced-Conversation of every answer, and kept for retention.conversations_days"
    raise NotFound("conversation", name, hint)


def model_traffic(session: Session, model: str) -> ModelTraffic:
    """Return the traffic of ``model`` in all stored conversations and trajectories."""
    of_model = select(func.count(), func.max(ConversationRow.at)).where(ConversationRow.model == model)
    conversations, last = session.exec(of_model).one()
    total = session.exec(select(func.count()).select_from(ConversationRow)).one()
    outcome = col(TrajectoryRow.outcome)
    is_production = (col(TrajectoryRow.cycle_id).is_(None), TrajectoryRow.end_cause != EndCause.SHADOW.value)
    query = select(outcome, func.count()).where(TrajectoryRow.model == model, *is_production)
    rows = session.exec(query.group_by(outcome).order_by(outcome))
    return ModelTraffic(conversations, total, last, {Outcome(name): count for name, count in rows})


def recent_traffic(session: Session, now: datetime) -> RecentTraffic:
    """Return the activity of all models in the day before ``now``."""
    day, hour = now - timedelta(days=1), now - timedelta(hours=1)
    exchanges = _recent_exchanges(session, day)
    models: dict[str, ModelActivity] = {}
    failures: dict[str, Counter[int]] = {}
    for exchange in exchanges:
        activity = models.setdefault(exchange.model, ModelActivity(exchange.model))
        activity.requests += 1
        if exchange.status == OK:
            activity.seconds.append(exchange.seconds)
        else:
            failures.setdefault(exchange.model, Counter())[exchange.status] += 1
    for model, counts in failures.items():
        models[model].failures = dict(sorted(counts.items()))
    for activity in models.values():
        activity.seconds.sort()
    visible = [exchange for exchange in exchanges if exchange.shadow_of is None]
    for model, count in _count_conversations(visible).items():
        models[model].day = count
    for model, count in _count_conversations([exchange for exchange in visible if exchange.at > hour]).items():
        models[model].hour = count
    shadows = [exchange for exchange in exchanges if exchange.shadow_of is not None]
    for model, count in _count_conversations(shadows).items():
        models[model].shadowed = count
    _add_outcomes(session, visible, models)
    _add_feedback(session, day, models)
    by_default = _default_reasons(session, visible, day)
    return RecentTraffic(dict(sorted(models.items())), by_default, partial=len(exchanges) >= MAX_EXCHANGES)


def list_routes(session: Session, *, limit: int, cursor: str | None = None, model: str = "") -> RoutePage:
    """Return a page of routing decisions, newest first.

    Args:
        limit: decisions per page.
        cursor: ``RoutePage.next`` of the previous page; raises ``NotFound`` if it is not a cursor of this database.
        model: only decisions for this model, "" for all.
    """
    # SQLite's row ids have the order of writing and need no index; PostgreSQL sorts by time.
    by_row = session.get_bind().dialect.name == "sqlite"
    at, key = col(ConversationRow.at), col(ConversationRow.id)
    position: SQLColumnExpression[Any] = literal_column("conversations.rowid") if by_row else at
    query = sql_select(ConversationRow, position).order_by(position.desc(), key.desc()).limit(limit + 1)
    if model:
        query = query.where(col(ConversationRow.model) == model)
    if cursor is not None:
        query = query.where(
            position < _parse_row_cursor(cursor) if by_row else tuple_(at, key) < tuple_(*_parse_time_cursor(cursor))
        )
    rows = session.execute(query).all()
    routes = [ConversationRoute(**row.model_dump()) for row, _ in rows[:limit]]
    if len(rows) <= limit:
        return RoutePage(routes, None)
    last, last_position = rows[limit - 1]
    return RoutePage(routes, str(last_position) if by_row else f"{last.at.isoformat()} {last.id}")


def _parse_row_cursor(cursor: str) -> int:
    """Parse a cursor of SQLite: a row id."""
    if not re.fullmatch(r"[0-9]{1,18}", cursor):
        raise _unknown_cursor(cursor)
    return int(cursor)


def _parse_time_cursor(cursor: str) -> tuple[datetime, str]:
    """Parse a cursor of PostgreSQL: a time and a conversation id."""
    at, _, name = cursor.partition(" ")
    try:
        return datetime.fromisoformat(at).astimezone(UTC), name
    except (ValueError, OverflowError) as error:
        raise _unknown_cursor(cursor) from error


def _unknown_cursor(cursor: str) -> NotFound:
    return NotFound("page of decisions behind", cursor, "take `before` from the previous page")


def _recent_exchanges(session: Session, start: datetime) -> list[_ExchangeHeader]:
    """Return at most ``MAX_EXCHANGES`` exchanges after ``start``, newest first."""
    # Two queries because the index is (settled_at, at). Settling comes after the exchange, so each exchange after
    # ``start`` is unsettled or was settled after ``start``.
    parts = [col(getattr(ExchangeRow, name)) for name in _ExchangeHeader._fields]
    at, settled_at = col(ExchangeRow.at), col(ExchangeRow.settled_at)
    query = sql_select(*parts).where(at > start).limit(MAX_EXCHANGES)
    queries = (
        query.where(settled_at.is_(None)).order_by(at.desc()),
        query.where(settled_at > start).order_by(settled_at.desc()),
    )
    exchanges = [_ExchangeHeader(*row) for query in queries for row in session.execute(query)]
    return sorted(exchanges, key=lambda exchange: exchange.at, reverse=True)[:MAX_EXCHANGES]


def _count_conversations(exchanges: Sequence[_ExchangeHeader]) -> Counter[str]:
    pairs = {(exchange.model, exchange.conversation_id) for exchange in exchanges}
    return Counter(model for model, _ in pairs)


def _add_outcomes(session: Session, exchanges: Sequence[_ExchangeHeader], models: dict[str, ModelActivity]) -> None:
    """Add the outcomes of the newest ``MAX_OUTCOMES`` trajectories to every model that has an exchange in them."""
    models_of: dict[str, set[str]] = {}
    for exchange in exchanges:
        key = exchange.trajectory_id
        if key is not None and (len(models_of) < MAX_OUTCOMES or key in models_of):
            models_of.setdefault(key, set()).add(exchange.model)
    for ids in batches(list(models_of)):
        query = select(TrajectoryRow.id, TrajectoryRow.outcome).where(col(TrajectoryRow.id).in_(ids))
        for trajectory_id, outcome_name in session.exec(query):
            for model in models_of[trajectory_id]:
                outcomes, outcome = models[model].outcomes, Outcome(outcome_name)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1


def _add_feedback(session: Session, start: datetime, models: dict[str, ModelActivity]) -> None:
    """Add the newest ``MAX_FEEDBACK`` entries of feedback to every model that has an exchange in the conversation."""
    query = select(FeedbackRow).order_by(col(FeedbackRow.seq).desc()).limit(MAX_FEEDBACK)
    rows = [row for row in session.exec(query) if row.at > start]
    models_of: dict[str, set[str]] = {}
    parts = (ExchangeRow.conversation_id, ExchangeRow.model)
    for ids in batches(list({row.conversation_id for row in rows})):
        is_visible = (col(ExchangeRow.conversation_id).in_(ids), col(ExchangeRow.shadow_of).is_(None))
        for conversation_id, model in session.exec(select(*parts).where(*is_visible).distinct()):
            models_of.setdefault(conversation_id, set()).add(model)
    for row in rows:
        for model in models_of.get(row.conversation_id, ()):
            feedback = Feedback(**row.model_dump(exclude={"seq", "id"}))
            models.setdefault(model, ModelActivity(model)).feedback.append(feedback)


def _default_reasons(session: Session, exchanges: Sequence[_ExchangeHeader], start: datetime) -> dict[str, int]:
    """Return the most frequent reasons for falling back to the base model, with their numbers of conversations."""
    reasons: Counter[str] = Counter()
    for ids in batches(list({exchange.conversation_id for exchange in exchanges})):
        is_default = (col(ConversationRow.id).in_(ids), ConversationRow.why != "", ConversationRow.at > start)
        reasons.update(session.exec(select(ConversationRow.why).where(*is_default)))
    return dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:MAX_REASONS])
