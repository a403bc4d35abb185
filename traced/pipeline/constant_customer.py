"""A customer of nearly all conversations of a target is a constant field of its client, and counts as no customer.

All conversations of a customer are in one split, so that a client which sends one constant ``user`` would have all of
them held out or none. The rule: a customer with at least ``MIN_SHARE`` of the target's conversations, of at least
``MIN_CONVERSATIONS``, is none. Its conversations get the split that they have without a customer.

Invariant: the split of a task stays once a cycle has selected a conversation of it or made a world of one; what a cycle
has used is never held out later. Not covered: a client that sends several constant values.
"""

from dataclasses import dataclass

from sqlmodel import Session

from store.records import StageState
from store.repositories.capabilities import labelled_trajectories, trajectory_headers
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.trajectories import conversations_of_customer, count_customers, update_splits
from traced.targets.conversation_target import ConversationTarget

MIN_SHARE, MIN_CONVERSATIONS = 0.9, 8
# Stage -> key of its detail that lists the conversations which it used (traced.pipeline.collect, .world).
USED_IDS = {"collect": "trajectories", "world": "conversations"}


@dataclass(frozen=True)
class ConstantCustomer:
    """The customer that counts as none, with its number of the target's ``total`` conversations."""

    customer: str
    conversations: int
    total: int

    @property
    def text(self) -> str:
        """Return what was found, and what to do."""
        return (
            f"one customer has {self.conversations} of {self.total} conversations, so it counts as none and the "
            "conversations are held out one by one; to keep each customer in one split, send a name per customer: the "
            "header X-Traced-Customer, or the field user"
        )


def find_constant_customer(session: Session, name: str) -> ConstantCustomer | None:
    """Return the customer of nearly all conversations of a target; None if there is none."""
    counts = count_customers(session, name)
    total = counts.total()
    customer, count = max(counts.items(), key=lambda item: (item[1], item[0]), default=("", 0))
    is_constant = customer and total >= MIN_CONVERSATIONS and count >= MIN_SHARE * total
    return ConstantCustomer(customer, count, total) if is_constant else None


def split_without_constant_customer(session: Session, target: ConversationTarget) -> ConstantCustomer | None:
    """Give the conversations of a constant customer the splits that they have without it, and return it."""
    constant = find_constant_customer(session, target.name)
    if constant is None:
        return None
    splits = {
        key: (target.split(task_id), task_id)
        for key, task_id, split in conversations_of_customer(session, target.name, constant.customer)
        if split != target.split(task_id)
    }
    if splits:
        used_tasks = _used_tasks(session, target.name)
        update_splits(session, {key: split for key, (split, task_id) in splits.items() if task_id not in used_tasks})
    return constant


def _used_tasks(session: Session, name: str) -> set[str]:
    ids: set[str] = set()
    for cycle in list_cycles(session, target=name):
        ids.update(labelled_trajectories(session, cycle.id))
        for event in list_stage_events(session, cycle.id):
            if event.stage in USED_IDS and event.state is StageState.FINISHED:
                ids.update(event.detail.get(USED_IDS[event.stage], []))
    return {header.task_id for header in trajectory_headers(session, sorted(ids)).values()}
