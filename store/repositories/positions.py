"""The positions by which routers recognise a conversation, and its routing decision with the time of its last answer.

Invariants: the first decision on a conversation is kept, whichever router made it, until the conversation has been
silent for the given time. A decision that failed is replaced by the next one. Positions are only added, and deleted
when they are old.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete
from sqlalchemy.orm import aliased
from sqlmodel import Session, and_, col, func, or_, select

from store.content import batches, insert_new
from store.records import ConversationPosition, ConversationRoute
from store.repositories.serving import find_routes, save_routes
from store.service_tables import ConversationRow, PositionRow

# Old positions are deleted in small batches, so that other writers do not wait long.
DELETE_BATCH = 2000
# Many users open alike and get the same answer: only the newest positions with a digest are read.
MAX_ALIKE = 128


@dataclass(frozen=True)
class StoredConversation:
    """What the store has of a conversation: its positions among those asked for, its decision, and its last answer.

    ``last_at`` is the time of the last answer, None without one. ``last_digests`` are the digests of the last answer.
    """

    positions: Sequence[ConversationPosition]
    route: ConversationRoute | None
    last_at: datetime | None
    last_digests: frozenset[str]


def save_positions(session: Session, positions: Sequence[ConversationPosition]) -> None:
    """Store positions; existing ones keep their time."""
    rows = [vars(position) | {"separators": " ".join(position.separators)} for position in positions]
    insert_new(session, PositionRow, rows)


def find_conversations(
    session: Session, *, digests: Collection[str] = (), ids: Collection[str] = ()
) -> dict[str, StoredConversation]:
    """Return the conversations with one of the ``digests`` or one of the ``ids``, by id."""
    positions: dict[str, list[ConversationPosition]] = {conversation_id: [] for conversation_id in ids}
    for batch in batches(list(digests)):
        rank = func.row_number().over(partition_by=col(PositionRow.digest), order_by=col(PositionRow.at).desc())
        ranked = select(PositionRow, rank.label("rank")).where(col(PositionRow.digest).in_(batch)).subquery()
        alias = aliased(PositionRow, ranked)
        for row in session.exec(select(alias).where(ranked.c.rank <= MAX_ALIKE).order_by(col(alias.at).desc())):
            positions.setdefault(row.conversation_id, []).append(_position(row))
    routes = find_routes(session, list(positions))
    last_answers = _last_answers(session, list(positions))
    conversations: dict[str, StoredConversation] = {}
    for conversation_id, of_conversation in positions.items():
        route = routes.get(conversation_id)
        last_at, last_digests = last_answers.get(conversation_id, (None, frozenset()))
        if route is not None or last_at is not None:
            conversations[conversation_id] = StoredConversation(of_conversation, route, last_at, last_digests)
    return conversations


def replace_invalid_routes(
    session: Session,
    routes: Sequence[ConversationRoute],
    *,
    expired_before: datetime,
    moved_ids: Collection[str] = (),
) -> dict[str, ConversationRoute]:
    """Store decisions, at most one for each conversation.

    Decisions that failed, and those on conversations in ``moved_ids`` or silent since ``expired_before``, are deleted
    before.

    Returns:
        The valid decision on each conversation, by conversation.
    """
    for batch in batches([route.id for route in routes]):
        answered_since = select(PositionRow.conversation_id).where(
            col(PositionRow.conversation_id) == col(ConversationRow.id), col(PositionRow.at) >= expired_before
        )
        is_expired = and_(col(ConversationRow.at) < expired_before, ~answered_since.exists())
        is_moved = col(ConversationRow.id).in_(moved_ids)
        is_invalid = or_(col(ConversationRow.is_failure), is_expired, is_moved)
        session.execute(delete(ConversationRow).where(col(ConversationRow.id).in_(batch), is_invalid))
    return save_routes(session, routes)


def delete_positions(session: Session, *, expired_before: datetime) -> int:
    """Delete at most ``DELETE_BATCH`` positions older than ``expired_before``, and return their number."""
    query = select(PositionRow.digest, PositionRow.conversation_id).where(col(PositionRow.at) < expired_before)
    rows = session.exec(query.limit(DELETE_BATCH)).all()
    for batch in batches(rows):
        digests, conversations = {row[0] for row in batch}, {row[1] for row in batch}
        is_selected = (col(PositionRow.digest).in_(digests), col(PositionRow.conversation_id).in_(conversations))
        session.execute(delete(PositionRow).where(*is_selected, col(PositionRow.at) < expired_before))
    return len(rows)


def _last_answers(session: Session, ids: Sequence[str]) -> dict[str, tuple[datetime, frozenset[str]]]:
    last_answers: dict[str, tuple[datetime, frozenset[str]]] = {}
    for batch in batches(ids):
        last = (
            select(PositionRow.conversation_id, func.max(PositionRow.at).label("at"))
            .where(col(PositionRow.conversation_id).in_(batch))
            .group_by(col(PositionRow.conversation_id))
            .subquery()
        )
        query = select(PositionRow).join(
            last, (last.c.conversation_id == col(PositionRow.conversation_id)) & (last.c.at == col(PositionRow.at))
        )
        for row in session.exec(query):
            _, digests = last_answers.get(row.conversation_id, (row.at, frozenset()))
            last_answers[row.conversation_id] = (row.at, digests | {row.digest})
    return last_answers


def _position(row: PositionRow) -> ConversationPosition:
    first, second, third = row.separators.split(" ")
    return ConversationPosition(row.digest, row.conversation_id, row.system, (first, second, third), row.at)
