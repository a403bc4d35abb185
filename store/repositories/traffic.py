"""The router's traffic for a person to look at: what became of one conversation, and what one model was given.

Invariants: read only; the bodies of exchanges are not read (their trajectories have the messages).
Fails: ``NotFound`` for a conversation that the router never had. Not covered: all models of late
(``store.repositories.lately``).
"""

from dataclasses import dataclass
from datetime import datetime

from sqlmodel import Session, col, func, select

from store.errors import NotFound
from store.repositories.serving import conversation_of, find_routes, list_exchanges, list_feedback, trajectories_of
from store.repositories.trajectories import get_trajectories
from store.serving_records import ConversationRoute, Exchange, Feedback
from store.serving_tables import ConversationRow
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
