"""Node boundaries of the cycles: a node of the graph begins (each new attempt at it), or has its answer.

Invariants: seen from what is in the store; promotion has no attempts, it begins when an adapter was approved and is
done with its event.
"""

from dataclasses import dataclass, field

from sqlalchemy import Engine
from sqlmodel import col, select

from store.database import read_session
from store.records import StageState
from store.repositories.attempts import AttemptState
from store.service_tables import AttemptRow
from store.tables import ApprovalRow, StageEventRow

NODES = ("collect", "analyze", "synthesize", "admit", "train", "gate", "compose", "promote", "evaluate", "report")
BEGINS, DONE = "begins", "done"
BOUNDARIES = tuple(f"{node} {event}" for node in NODES for event in (BEGINS, DONE))
RECENT = 50  # rows looked at of each table; more are not written between two looks

Passed = tuple[int, str]  # a row's number and the boundary


@dataclass
class Watch:
    """Report the stage boundaries passed since the last look; ``last_boundary`` is the most recent one."""

    store: Engine
    last_boundary: str = "nothing yet"
    passed: set[Passed] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> list[str]:
        """The boundaries passed since the last look, oldest attempt first."""
        new = sorted(set(_passed(self.store)) - self.passed)
        self.passed.update(new)
        names = [name for _, name in new]
        self.last_boundary = names[-1] if names else self.last_boundary
        return names


def _passed(store: Engine) -> list[Passed]:
    attempts = select(AttemptRow.seq, AttemptRow.stage, AttemptRow.state).order_by(col(AttemptRow.seq).desc())
    approval_query = select(ApprovalRow.seq).order_by(col(ApprovalRow.seq).desc()).limit(RECENT)
    promotion_query = (
        select(StageEventRow.seq)
        .where(StageEventRow.stage == "promote", StageEventRow.state == StageState.FINISHED.value)
        .order_by(col(StageEventRow.seq).desc())
        .limit(RECENT)
    )
    with read_session(store) as session:
        rows = session.exec(attempts.limit(RECENT)).all()
        approvals, promotions = session.exec(approval_query).all(), session.exec(promotion_query).all()
    return [
        *((seq or 0, f"{stage} {BEGINS}") for seq, stage, _ in rows),
        *((seq or 0, f"{stage} {DONE}") for seq, stage, state in rows if state == AttemptState.FINISHED),
        *((seq or 0, f"promote {BEGINS}") for seq in approvals),
        *((seq or 0, f"promote {DONE}") for seq in promotions),
    ]
