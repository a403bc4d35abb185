"""The router's decisions, its exchanges and the feedback on them.

Invariants: the first decision on a conversation stays, whoever made it; the same exchange twice is one row; an exchange
is settled once, then it has no body any more; feedback is only added, in the order of ``list_feedback``.
Not covered: making trajectories of exchanges (``traced.ingest.settlement``).

Which model the router picked for each conversation; the source of an adapter's share of the traffic.

Invariants: one choice per conversation, for its whole length; the first one stored stays.
Fails: a choice for a trajectory that is not stored is a ``BrokenReference``.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import zstandard
from sqlalchemy.orm import defer
from sqlmodel import Session, col, func, select, update

from store.content import digest, insert_new
from store.errors import NotFound, StoreConflict
from store.records import ConversationRoute, Exchange, Feedback, RouterKey, RoutingChoice
from store.service_tables import ConversationRow, ExchangeRow, FeedbackRow, RouterKeyRow
from store.tables import RoutingRow, TrajectoryRow
from store.types import Outcome

IDS_PER_QUERY = 500
ROUTED = "exchange-"  # ids of what went through the router begin so


def save_routes(session: Session, routes: Sequence[ConversationRoute]) -> dict[str, ConversationRoute]:
    """Store decisions; returns those that count by conversation, which are the first."""
    insert_new(session, ConversationRow, [asdict(route) for route in routes])
    return find_routes(session, [route.id for route in routes])


def find_routes(session: Session, conversation_ids: Sequence[str]) -> dict[str, ConversationRoute]:
    """The decisions on conversations, by conversation; those without one are left out."""
    found: dict[str, ConversationRoute] = {}
    for start in range(0, len(conversation_ids), IDS_PER_QUERY):
        chosen = col(ConversationRow.id).in_(conversation_ids[start : start + IDS_PER_QUERY])
        query = select(ConversationRow).where(chosen).execution_options(populate_existing=True)
        found |= {row.id: ConversationRoute(**row.model_dump()) for row in session.exec(query)}
    return found


def taking_part(session: Session, trials: Collection[int]) -> dict[str, tuple[str, int]]:
    """The conversations of trials (numbers of log entries): the model that each was given, and its trial.

    Those in which another model answered too are left out; one that is not recorded counts for what it was given.
    """
    query = select(ConversationRow.id, ConversationRow.model, ConversationRow.trial)
    by_another = select(ExchangeRow.id).where(
        col(ExchangeRow.conversation_id) == col(ConversationRow.id),
        col(ExchangeRow.model) != col(ConversationRow.model),
        col(ExchangeRow.shadow_of).is_(None),
        ExchangeRow.status == 200,
    )
    rows = session.exec(query.where(col(ConversationRow.trial).in_(list(trials)), ~by_another.exists()))
    return {conversation_id: (model, trial) for conversation_id, model, trial in rows if trial is not None}


def count_taking_part(session: Session, trials: Collection[int]) -> int:
    """How many conversations take part in trials, whoever else answered in them."""
    query = select(func.count()).select_from(ConversationRow).where(col(ConversationRow.trial).in_(list(trials)))
    return session.exec(query).one()


def judged(session: Session, trials: Collection[int]) -> dict[str, Outcome]:
    """The outcomes of settled conversations of trials, by conversation; of several branches the last one's."""
    query = select(ConversationRow.id, TrajectoryRow.outcome).where(col(ConversationRow.trial).in_(list(trials)))
    query = query.join(ExchangeRow, col(ExchangeRow.conversation_id) == col(ConversationRow.id))
    query = query.join(TrajectoryRow, col(TrajectoryRow.id) == col(ExchangeRow.trajectory_id))
    query = query.where(col(ExchangeRow.shadow_of).is_(None)).order_by(col(ExchangeRow.at))
    return {conversation_id: Outcome(outcome) for conversation_id, outcome in session.exec(query)}


def last_feedback(session: Session) -> int:
    """The number of the newest feedback; 0 where there is none."""
    return session.exec(select(func.max(FeedbackRow.seq))).one() or 0


def save_exchanges(session: Session, exchanges: Iterable[Exchange]) -> None:
    """Store exchanges; those that are there already stay as they are."""
    insert_new(session, ExchangeRow, [{**vars(one), "body": _packed(one.body)} for one in exchanges])


def open_conversations(session: Session, *, before: datetime, limit: int) -> list[str]:
    """Conversations with unsettled exchanges of which the newest is from before a moment, the longest silent first."""
    newest = func.max(ExchangeRow.at)
    query = select(ExchangeRow.conversation_id).where(col(ExchangeRow.settled_at).is_(None))
    grouped = query.group_by(col(ExchangeRow.conversation_id)).having(newest < before).order_by(newest).limit(limit)
    return list(session.exec(grouped))


def list_exchanges(
    session: Session, conversation_id: str, *, unsettled: bool = False, bodies: bool = True
) -> list[Exchange]:
    """A conversation's exchanges, oldest first."""
    query = select(ExchangeRow).where(ExchangeRow.conversation_id == conversation_id)
    if unsettled:
        query = query.where(col(ExchangeRow.settled_at).is_(None))
    if not bodies:
        query = query.options(defer(ExchangeRow.body))  # type: ignore[arg-type]  # SQLModel types it as its value
    rows = session.exec(query.order_by(col(ExchangeRow.at), col(ExchangeRow.id)))
    return [_exchange(row, bodies=bodies) for row in rows]


def settle(session: Session, trajectories: dict[str, str | None], *, at: datetime) -> None:
    """Note that exchanges are settled: id to the trajectory that each is part of (None: of none)."""
    for exchange_id, trajectory_id in trajectories.items():
        values = {"settled_at": at, "trajectory_id": trajectory_id, "body": None}
        session.execute(update(ExchangeRow).where(col(ExchangeRow.id) == exchange_id).values(**values))


def set_aside(session: Session, conversation_id: str, *, at: datetime) -> None:
    """Have the unsettled exchanges of a conversation count as settled, bodies and all, as part of no trajectory."""
    mine = (col(ExchangeRow.conversation_id) == conversation_id, col(ExchangeRow.settled_at).is_(None))
    session.execute(update(ExchangeRow).where(*mine).values(settled_at=at))


def hand_over(session: Session, trajectory_id: str, to: str) -> None:
    """Make the exchanges of a trajectory another one's, into which it went on."""
    mine = col(ExchangeRow.trajectory_id) == trajectory_id
    session.execute(update(ExchangeRow).where(mine).values(trajectory_id=to))


def is_known(session: Session, conversation_id: str) -> bool:
    """Whether the router ever had this conversation."""
    query = select(ExchangeRow.id).where(ExchangeRow.conversation_id == conversation_id).limit(1)
    return session.exec(query).first() is not None or bool(find_routes(session, [conversation_id]))


def conversation_of(session: Session, response_id: str) -> str | None:
    """The conversation in which an answer was given."""
    query = select(ExchangeRow.conversation_id).where(ExchangeRow.response_id == response_id).limit(1)
    return session.exec(query).first()


def answered_by_router(session: Session, response_ids: Sequence[str], *, since: datetime) -> set[str]:
    """Which of these answers the router itself gave since a moment, as against those that were told by spans."""
    found: set[str] = set()
    for start in range(0, len(response_ids), IDS_PER_QUERY):
        chosen = col(ExchangeRow.response_id).in_(response_ids[start : start + IDS_PER_QUERY])
        query = select(ExchangeRow.response_id).where(chosen, col(ExchangeRow.id).startswith(ROUTED))
        found |= set(session.exec(query.where(ExchangeRow.at >= since)))
    return found


def trajectories_of(session: Session, conversation_id: str, response_id: str = "") -> list[str]:
    """The trajectories that a conversation became, or the one that an answer in it is part of."""
    query = select(ExchangeRow.trajectory_id).where(
        ExchangeRow.conversation_id == conversation_id,
        col(ExchangeRow.trajectory_id).is_not(None),
        col(ExchangeRow.shadow_of).is_(None),  # nobody has seen a shadow
    )
    if response_id:
        query = query.where(ExchangeRow.response_id == response_id)
    return sorted({found for found in session.exec(query) if found is not None})


def exchanges_of(session: Session, trajectory_id: str) -> list[Exchange]:
    """The exchanges that became part of a trajectory."""
    return [
        _exchange(row) for row in session.exec(select(ExchangeRow).where(ExchangeRow.trajectory_id == trajectory_id))
    ]


def talked_of(session: Session, trajectory_ids: Sequence[str]) -> set[str]:
    """Those of these trajectories that came from the router, or that feedback names."""
    found: set[str] = set()
    for start in range(0, len(trajectory_ids), IDS_PER_QUERY):
        ids = trajectory_ids[start : start + IDS_PER_QUERY]
        for column in (col(ExchangeRow.trajectory_id), col(FeedbackRow.conversation_id)):
            found |= {one for one in session.exec(select(column).where(column.in_(ids)).distinct()) if one is not None}
    return found


def save_feedback(session: Session, feedback: Feedback) -> None:
    """Add what somebody thought; the same twice is one row."""
    values = asdict(feedback)
    insert_new(session, FeedbackRow, [{"id": digest(values), **values}])


def list_feedback(session: Session, conversation_ids: Collection[str]) -> list[Feedback]:
    """The feedback on conversations, in the order of writing."""
    found: list[FeedbackRow] = []
    ids: Sequence[str] = list(conversation_ids)
    for start in range(0, len(ids), IDS_PER_QUERY):
        chosen = col(FeedbackRow.conversation_id).in_(ids[start : start + IDS_PER_QUERY])
        found += session.exec(select(FeedbackRow).where(chosen))
    found.sort(key=lambda row: row.seq or 0)
    return [Feedback(**row.model_dump(exclude={"seq", "id"})) for row in found]


def save_key(session: Session, key: RouterKey) -> None:
    """Add a key, the same twice is one; raises ``StoreConflict`` where the name was ever another key's."""
    known = session.get(RouterKeyRow, key.id)
    if known is not None:
        if known.hash == key.hash:
            return
        raise StoreConflict(f"there is or was a key named {key.id!r}; take another name")
    session.add(RouterKeyRow(**asdict(key)))
    session.flush()


def revoke_key(session: Session, name: str, *, at: datetime) -> None:
    """Take a key back; twice is no error. Raises ``NotFound``."""
    row = session.get(RouterKeyRow, name)
    if row is None:
        raise NotFound("key", name, "traced keys list")
    row.revoked_at = row.revoked_at or at
    session.add(row)


def list_keys(session: Session) -> list[RouterKey]:
    """All keys that ever were, oldest first."""
    query = select(RouterKeyRow).order_by(col(RouterKeyRow.created_at), col(RouterKeyRow.id))
    return [RouterKey(**row.model_dump()) for row in session.exec(query)]


def _packed(body: dict[str, Any] | None) -> bytes | None:
    if body is None:
        return None
    text = json.dumps(body, separators=(",", ":"))  # ASCII: a lone surrogate stays what it is
    return zstandard.ZstdCompressor(level=1).compress(text.encode())


def _exchange(row: ExchangeRow, *, bodies: bool = True) -> Exchange:
    values = row.model_dump(exclude={"body", "settled_at"})
    body = None if not bodies or row.body is None else json.loads(zstandard.ZstdDecompressor().decompress(row.body))
    return Exchange(**values, body=body)


def save_routing(session: Session, choices: Iterable[RoutingChoice]) -> None:
    """Store the router's choices; save their trajectories first."""
    insert_new(session, RoutingRow, [asdict(choice) for choice in choices])


def list_routing(session: Session, *, cycle_id: str | None = None) -> list[RoutingChoice]:
    """The choices made for a cycle's trajectories (None: all), by trajectory id."""
    query = select(RoutingRow).join(TrajectoryRow).order_by(col(RoutingRow.trajectory_id))
    if cycle_id is not None:
        query = query.where(TrajectoryRow.cycle_id == cycle_id)
    return [RoutingChoice(**row.model_dump()) for row in session.exec(query)]


def traffic(session: Session) -> dict[str, int]:
    """How many routed conversations each model has had."""
    return dict(session.exec(select(RoutingRow.model, func.count()).group_by(col(RoutingRow.model))).all())
