"""Routing decisions, exchanges, feedback and API keys of the router, and the routing choices of test conversations.

Invariants: the first decision on a conversation is kept, whichever router made it. An exchange is settled once, which
deletes its body except if the conversation cannot be made into trajectories. Feedback is only added.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from datetime import datetime

import zstandard
from sqlalchemy.orm import defer
from sqlmodel import Session, col, func, select, update

from store.content import batches, digest, insert_new, insert_unique
from store.errors import NotFound, StoreConflict
from store.records import ConversationRoute, Exchange, Feedback, RouterKey, RoutingChoice
from store.service_tables import ConversationRow, CustomerKeyRow, ExchangeRow, FeedbackRow, RouterKeyRow
from store.tables import RoutingRow, TrajectoryRow
from store.types import JsonObject, Outcome, Trajectory

# Prefix of the ids of exchanges that the router recorded; exchanges reported by OpenTelemetry spans have other ids.
EXCHANGE_PREFIX = "exchange-"


def save_routes(session: Session, routes: Sequence[ConversationRoute]) -> dict[str, ConversationRoute]:
    """Store decisions, and return the valid decision (the first stored) on each conversation, by conversation."""
    inserted = insert_unique(session, ConversationRow, [vars(route) for route in routes], "id")
    by_id = {route.id: route for route in routes if route.id in inserted}
    return by_id | find_routes(session, [route.id for route in routes if route.id not in inserted])


def find_routes(session: Session, conversation_ids: Sequence[str]) -> dict[str, ConversationRoute]:
    """Return the decisions on conversations, by conversation; conversations without a decision are left out."""
    routes: dict[str, ConversationRoute] = {}
    for batch in batches(conversation_ids):
        query = select(ConversationRow).where(col(ConversationRow.id).in_(batch))
        # Another router may have stored its decision first, so rows that this session has read may be out of date.
        query = query.execution_options(populate_existing=True)
        routes |= {row.id: ConversationRoute(**row.model_dump()) for row in session.exec(query)}
    return routes


def trial_conversations(session: Session, trials: Collection[int]) -> dict[str, tuple[str, int]]:
    """Return the model and the trial (number of a promotion log entry) of each conversation in one of ``trials``.

    Conversations in which another model answered too are left out; those without recorded exchanges are included.
    """
    query = select(ConversationRow.id, ConversationRow.model, ConversationRow.trial)
    other_model_answered = select(ExchangeRow.id).where(
        col(ExchangeRow.conversation_id) == col(ConversationRow.id),
        col(ExchangeRow.model) != col(ConversationRow.model),
        col(ExchangeRow.shadow_of).is_(None),
        ExchangeRow.status == 200,
    )
    rows = session.exec(query.where(col(ConversationRow.trial).in_(list(trials)), ~other_model_answered.exists()))
    return {conversation_id: (model, trial) for conversation_id, model, trial in rows if trial is not None}


def count_trial_conversations(session: Session, trials: Collection[int]) -> int:
    """Return the number of conversations that take part in trials, including those with answers of other models."""
    query = select(func.count()).select_from(ConversationRow).where(col(ConversationRow.trial).in_(list(trials)))
    return session.exec(query).one()


def trial_outcomes(session: Session, trials: Collection[int]) -> dict[str, tuple[str, Outcome]]:
    """Return the trajectory id and the outcome of each settled conversation of trials, by conversation.

    Of several branches, the newest exchange counts.
    """
    columns = (ConversationRow.id, TrajectoryRow.id, TrajectoryRow.outcome)
    query = select(*columns).where(col(ConversationRow.trial).in_(list(trials)))
    query = query.join(ExchangeRow, col(ExchangeRow.conversation_id) == col(ConversationRow.id))
    query = query.join(TrajectoryRow, col(TrajectoryRow.id) == col(ExchangeRow.trajectory_id))
    query = query.where(col(ExchangeRow.shadow_of).is_(None)).order_by(col(ExchangeRow.at))
    return {key: (trajectory_id, Outcome(outcome)) for key, trajectory_id, outcome in session.exec(query)}


def last_feedback(session: Session) -> int:
    """Return the ``seq`` of the newest feedback, 0 if there is none."""
    return session.exec(select(func.max(FeedbackRow.seq))).one() or 0


def save_exchanges(session: Session, exchanges: Iterable[Exchange]) -> None:
    """Store exchanges; existing rows are kept."""
    insert_new(session, ExchangeRow, [{**vars(exchange), "body": _compress(exchange.body)} for exchange in exchanges])


def silent_conversations(session: Session, *, silent_since: datetime, limit: int) -> list[str]:
    """Return the conversations whose newest unsettled exchange is before ``silent_since``, the longest silent first."""
    newest_exchange = func.max(ExchangeRow.at)
    query = select(ExchangeRow.conversation_id).where(col(ExchangeRow.settled_at).is_(None))
    grouped = (
        query.group_by(col(ExchangeRow.conversation_id))
        .having(newest_exchange < silent_since)
        .order_by(newest_exchange)
        .limit(limit)
    )
    return list(session.exec(grouped))


def list_exchanges(
    session: Session, conversation_id: str, *, unsettled_only: bool = False, bodies: bool = True
) -> list[Exchange]:
    """Return the exchanges of a conversation, oldest first; without ``bodies`` every ``Exchange.body`` is None."""
    query = select(ExchangeRow).where(ExchangeRow.conversation_id == conversation_id)
    if unsettled_only:
        query = query.where(col(ExchangeRow.settled_at).is_(None))
    if not bodies:
        query = query.options(defer(ExchangeRow.body))  # type: ignore[arg-type]  # SQLModel types it as its value
    rows = session.exec(query.order_by(col(ExchangeRow.at), col(ExchangeRow.id)))
    return [_exchange(row, bodies=bodies) for row in rows]


def settle_exchanges(session: Session, trajectories: dict[str, str | None], *, at: datetime) -> None:
    """Mark exchanges as settled and delete their bodies.

    ``trajectories`` maps the id of each exchange to the id of the trajectory that contains it, None for no trajectory.
    """
    for exchange_id, trajectory_id in trajectories.items():
        values = {"settled_at": at, "trajectory_id": trajectory_id, "body": None}
        session.execute(update(ExchangeRow).where(col(ExchangeRow.id) == exchange_id).values(**values))


def settle_without_trajectory(session: Session, conversation_id: str, *, at: datetime) -> None:
    """Mark the unsettled exchanges of a conversation as settled without a trajectory; their bodies are kept."""
    is_unsettled = (col(ExchangeRow.conversation_id) == conversation_id, col(ExchangeRow.settled_at).is_(None))
    session.execute(update(ExchangeRow).where(*is_unsettled).values(settled_at=at))


def reassign_exchanges(session: Session, trajectory_id: str, successor_id: str) -> None:
    """Assign the exchanges of a trajectory to the trajectory ``successor_id``, which continues it."""
    is_part = col(ExchangeRow.trajectory_id) == trajectory_id
    session.execute(update(ExchangeRow).where(is_part).values(trajectory_id=successor_id))


def is_known_conversation(session: Session, conversation_id: str) -> bool:
    """Return whether an exchange of this conversation or a decision on it is stored."""
    query = select(ExchangeRow.id).where(ExchangeRow.conversation_id == conversation_id).limit(1)
    return session.exec(query).first() is not None or bool(find_routes(session, [conversation_id]))


def conversation_of(session: Session, response_id: str, *, key_id: str | None = None) -> str | None:
    """Return the conversation of a response, None if it is unknown; the newest, because ids of some engines recur.

    ``key_id`` limits the search to the exchanges of one API key ("": those without a key).
    """
    query = select(ExchangeRow.conversation_id).where(ExchangeRow.response_id == response_id)
    if key_id is not None:
        query = query.where(ExchangeRow.key_id == key_id)
    return session.exec(query.order_by(col(ExchangeRow.at).desc()).limit(1)).first()


def answered_by_router(session: Session, response_ids: Sequence[str], *, start: datetime) -> set[str]:
    """Return those of ``response_ids`` that the router recorded since ``start``; exchanges from spans do not count."""
    router_responses: set[str] = set()
    for batch in batches(response_ids):
        query = select(ExchangeRow.response_id).where(col(ExchangeRow.response_id).in_(batch))
        query = query.where(col(ExchangeRow.id).startswith(EXCHANGE_PREFIX))
        router_responses |= set(session.exec(query.where(ExchangeRow.at >= start)))
    return router_responses


def trajectories_of(session: Session, conversation_id: str, response_id: str = "") -> list[str]:
    """Return the ids of a conversation's trajectories, or only of those that contain a response; without shadows."""
    query = select(ExchangeRow.trajectory_id).where(
        ExchangeRow.conversation_id == conversation_id,
        col(ExchangeRow.trajectory_id).is_not(None),
        # A client never sees the answer of a shadow, so feedback cannot refer to it.
        col(ExchangeRow.shadow_of).is_(None),
    )
    if response_id:
        query = query.where(ExchangeRow.response_id == response_id)
    return sorted({trajectory_id for trajectory_id in session.exec(query) if trajectory_id is not None})


def exchanges_of(session: Session, trajectory_id: str) -> list[Exchange]:
    """Return the exchanges of a trajectory, in no particular order."""
    query = select(ExchangeRow).where(ExchangeRow.trajectory_id == trajectory_id)
    return [_exchange(row) for row in session.exec(query)]


def router_trajectories(session: Session, trajectory_ids: Sequence[str]) -> set[str]:
    """Return those of ``trajectory_ids`` that have exchanges, or feedback under the id of the trajectory."""
    connected: set[str] = set()
    for batch in batches(trajectory_ids):
        for column in (col(ExchangeRow.trajectory_id), col(FeedbackRow.conversation_id)):
            connected |= {
                trajectory_id
                for trajectory_id in session.exec(select(column).where(column.in_(batch)).distinct())
                if trajectory_id is not None
            }
    return connected


def save_feedback(session: Session, feedback: Feedback) -> None:
    """Add feedback; saving the same feedback twice adds one row."""
    values = asdict(feedback)
    insert_new(session, FeedbackRow, [{"id": digest(values), **values}])


def list_feedback(session: Session, conversation_ids: Collection[str]) -> list[Feedback]:
    """Return the feedback on conversations, in order of writing."""
    rows: list[FeedbackRow] = []
    for batch in batches(list(conversation_ids)):
        rows += session.exec(select(FeedbackRow).where(col(FeedbackRow.conversation_id).in_(batch)))
    rows.sort(key=lambda row: row.seq or 0)
    return [Feedback(**row.model_dump(exclude={"seq", "id"})) for row in rows]


def save_key(session: Session, key: RouterKey) -> None:
    """Add an API key; raises ``StoreConflict`` if its name was ever used for another key, even a revoked one."""
    existing = session.get(RouterKeyRow, key.id)
    if existing is not None:
        if existing.hash == key.hash:
            return
        raise StoreConflict(f"the key name {key.id!r} is in use or was used before; choose another name")
    session.add(RouterKeyRow(**asdict(key)))
    session.flush()


def revoke_key(session: Session, name: str, *, at: datetime) -> None:
    """Revoke an API key; revoking it again changes nothing. Raises ``NotFound``."""
    row = session.get(RouterKeyRow, name)
    if row is None:
        raise NotFound("key", name, "traced keys list")
    row.revoked_at = row.revoked_at or at
    session.add(row)


def list_keys(session: Session) -> list[RouterKey]:
    """Return all API keys, revoked ones included, oldest first."""
    query = select(RouterKeyRow).order_by(col(RouterKeyRow.created_at), col(RouterKeyRow.id))
    return [RouterKey(**row.model_dump()) for row in session.exec(query)]


def customer_key(session: Session, new_key: str) -> str:
    """Return the key (hex) of the hashes of customers' names, which is ``new_key`` if the store had none."""
    insert_new(session, CustomerKeyRow, [{"id": 1, "key": new_key}])
    return session.exec(select(CustomerKeyRow.key)).one()


def save_routing(session: Session, choices: Iterable[RoutingChoice]) -> None:
    """Store routing choices of played conversations; their trajectories must be stored first."""
    insert_new(session, RoutingRow, [asdict(choice) for choice in choices])


def list_routing(session: Session, *, cycle_id: str | None = None) -> list[RoutingChoice]:
    """Return the routing choices for the trajectories of a cycle (None: of all cycles), ordered by trajectory id."""
    query = select(RoutingRow).join(TrajectoryRow).order_by(col(RoutingRow.trajectory_id))
    if cycle_id is not None:
        query = query.where(TrajectoryRow.cycle_id == cycle_id)
    return [RoutingChoice(**row.model_dump()) for row in session.exec(query)]


def count_routed(session: Session, *, cycle_id: str | None = None) -> dict[str, int]:
    """Return the number of test conversations (of a cycle) routed to each model, by model."""
    query = select(RoutingRow.model, func.count()).join(TrajectoryRow).where(TrajectoryRow.split == "test")
    if cycle_id is not None:
        query = query.where(TrajectoryRow.cycle_id == cycle_id)
    return dict(session.exec(query.group_by(col(RoutingRow.model))).all())


def answering_models(session: Session, trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Return the model that answered each trajectory: the one that it was routed to, else the model of the episode."""
    models = {trajectory.id: trajectory.model for trajectory in trajectories}
    for batch in batches(list(models)):
        query = select(RoutingRow.trajectory_id, RoutingRow.model).where(col(RoutingRow.trajectory_id).in_(batch))
        models |= dict(session.exec(query).all())
    return models


def models_in_conversations(session: Session, trajectories: Sequence[Trajectory]) -> dict[str, set[str]]:
    """Return the models that answered in each reported trajectory, whose own model is that of its last answer."""
    models = {trajectory.id: {trajectory.model} for trajectory in trajectories}
    for batch in batches(list(models)):
        query = select(ExchangeRow.trajectory_id, ExchangeRow.model).distinct()
        for trajectory_id, model in session.exec(query.where(col(ExchangeRow.trajectory_id).in_(batch))):
            if trajectory_id is not None:
                models[trajectory_id].add(model)
    return models


def _compress(body: JsonObject | None) -> bytes | None:
    if body is None:
        return None
    # The JSON is ASCII with escapes, because UTF-8 cannot encode lone surrogates.
    text = json.dumps(body, separators=(",", ":"))
    return zstandard.ZstdCompressor(level=1).compress(text.encode())


def _exchange(row: ExchangeRow, *, bodies: bool = True) -> Exchange:
    values = row.model_dump(exclude={"body", "settled_at"})
    body = None if not bodies or row.body is None else json.loads(zstandard.ZstdDecompressor().decompress(row.body))
    return Exchange(**values, body=body)
