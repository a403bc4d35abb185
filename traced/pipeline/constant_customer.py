"""A customer of nearly all conversations of a target is a constant field of its client, and counts as no customer.

All conversations of a customer are in one split, so that a client which sends one constant ``user`` would have all of
them held out or none. The rule: a customer with at least ``MIN_SHARE`` of the target's conversations, of at least
``MIN_CONVERSATIONS``, is none. Its conversations get the split that they have without a customer.

Invariant: splits change only before a cycle of the target has used conversations. From the first cycle that has
finished one of ``USING_STAGES`` on nothing is moved, so that what a cycle has used is never held out later, under
whatever id it continues; later conversations keep the customer's split. Not covered: a client that sends several
constant values.
"""

from dataclasses import dataclass

from sqlalchemy import Engine
from sqlmodel import Session

from store.database import read_session, write_session
from store.repositories.cycles import has_finished_stage
from store.repositories.trajectories import conversations_of_customer, count_customers, update_splits
from traced.targets.conversation_target import ConversationTarget

MIN_SHARE, MIN_CONVERSATIONS = 0.9, 8
USING_STAGES = ("collect", "world")  # those that choose conversations


@dataclass(frozen=True)
class ConstantCustomer:
    """The customer that counts as none, with its number of the target's ``total`` conversations.

    Attributes:
        is_late: A cycle has used conversations, so that their splits stay.
    """

    customer: str
    conversations: int
    total: int
    is_late: bool

    @property
    def text(self) -> str:
        """Return what was found, and what to do."""
        consequence = (
            "but a cycle has used conversations, so the splits stay and later conversations keep the customer's split"
            if self.is_late
            else "so it counts as none and the conversations are held out by task"
        )
        return (
            f"one customer has {self.conversations} of {self.total} conversations, {consequence}; to keep each "
            "customer in one split, send a name per customer: the header X-Traced-Customer, or the field user"
        )


def find_constant_customer(session: Session, name: str) -> ConstantCustomer | None:
    """Return the customer of nearly all conversations of a target; None if there is none."""
    counts = count_customers(session, name)
    total = counts.total()
    customer, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    if not customer or total < MIN_CONVERSATIONS or count < MIN_SHARE * total:
        return None
    return ConstantCustomer(customer, count, total, has_finished_stage(session, name, USING_STAGES))


def split_without_constant_customer(store: Engine, target: ConversationTarget) -> ConstantCustomer | None:
    """Give the conversations of a constant customer the splits that they have without it, and return it.

    The store is locked for writing only if a split changes.
    """
    with read_session(store) as session:
        constant, splits = _changed_splits(session, target)
    if splits:
        with write_session(store) as session:
            # A cycle may have used conversations meanwhile.
            return update_constant_customer(session, target)
    return constant


def update_constant_customer(session: Session, target: ConversationTarget) -> ConstantCustomer | None:
    """Do the same within a transaction."""
    constant, splits = _changed_splits(session, target)
    update_splits(session, splits)
    return constant


def _changed_splits(session: Session, target: ConversationTarget) -> tuple[ConstantCustomer | None, dict[str, str]]:
    constant = find_constant_customer(session, target.name)
    if constant is None or constant.is_late:
        return constant, {}
    rows = conversations_of_customer(session, target.name, constant.customer)
    splits = {key: (split, target.split(task_id)) for key, task_id, split in rows}
    return constant, {key: new for key, (old, new) in splits.items() if new != old}
