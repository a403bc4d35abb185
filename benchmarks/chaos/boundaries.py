"""Boundaries of the cycles: a node of the graph begins (each new attempt at it), or has its answer.

Invariants: seen from what is in the store; promotion has no attempts, it begins when an adapter was approved and is
done with its event. Those of ``LIVE_BOUNDARIES`` count only in a cycle whose incumbent has adapters: in another one
nothing is played again, and nothing is watched.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from sqlalchemy import Engine
from sqlmodel import Session, col, select

from benchmarks.chaos.violations import REPLAY_PREFIX
from store.database import read_session
from store.records import StageState
from store.repositories.attempts import AttemptState
from store.repositories.cycles import list_cycles
from store.repositories.evidence import ATTRIBUTE, BASE, INCUMBENT
from store.service_tables import AttemptRow
from store.tables import ApprovalRow, StageEventRow, TrajectoryRow

NODES = ("collect", "analyze", "synthesize", "admit", "train", "gate", "compose", "promote", "evaluate", "report")
BEGINS, DONE = "begins", "done"
INCUMBENT_STORED = "incumbent stored"
# The first episode of each kind that only these cycles have. The regression watch runs inside of the attribution: it
# begins after the replays, and its result is in the event of the attribution.
BASE_EPISODE, REPLAY, WATCH_EPISODE = "base episode stored", "replay stored", "watch episode stored"
EPISODES = (BASE_EPISODE, REPLAY, WATCH_EPISODE)
WATCH_STORED = "watch result stored"
LIVE_BOUNDARIES = (INCUMBENT_STORED, *EPISODES, WATCH_STORED, f"{ATTRIBUTE} {BEGINS}", f"{ATTRIBUTE} {DONE}")
BOUNDARIES = (*(f"{node} {event}" for node in NODES for event in (BEGINS, DONE)), *LIVE_BOUNDARIES)
RECENT = 50  # rows looked at of each table; more are not written between two looks


class Passed(NamedTuple):
    """A boundary that was passed: the number of its row, its name, and the cycle where the number is not unique."""

    number: int
    name: str
    cycle_id: str = ""


@dataclass
class Watch:
    """Report the stage boundaries passed since the last look; ``last_boundary`` is the most recent one."""

    store: Engine
    last_boundary: str = "nothing yet"
    passed: set[Passed] = field(default_factory=set)
    models: dict[str, list[str]] = field(default_factory=dict)  # by cycle; an incumbent never changes

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> list[str]:
        """The boundaries passed since the last look, oldest attempt first."""
        with read_session(self.store) as session:
            new = sorted({*self._of_nodes(session), *self._of_newest_cycle(session)} - self.passed)
        self.passed.update(new)
        names = [row.name for row in new]
        self.last_boundary = names[-1] if names else self.last_boundary
        return names

    def _of_nodes(self, session: Session) -> list[Passed]:
        query = select(AttemptRow.seq, AttemptRow.stage, AttemptRow.state, AttemptRow.cycle_id)
        attempts = session.exec(query.order_by(col(AttemptRow.seq).desc()).limit(RECENT)).all()
        approvals = select(ApprovalRow.seq).order_by(col(ApprovalRow.seq).desc()).limit(RECENT)
        return [
            *(
                Passed(seq or 0, f"{stage} {event}")
                for seq, stage, state, cycle_id in attempts
                for event in (BEGINS, *([DONE] if state == AttemptState.FINISHED else []))
                if stage != ATTRIBUTE or self._has_adapters(session, cycle_id)
            ),
            *(Passed(seq or 0, f"promote {BEGINS}") for seq in session.exec(approvals)),
            *(Passed(seq, f"promote {DONE}") for seq in _finished(session, "promote")),
        ]

    def _of_newest_cycle(self, session: Session) -> list[Passed]:
        cycle = next(iter(list_cycles(session, limit=1)), None)
        if cycle is None or not self._has_adapters(session, cycle.id):
            return []
        passed = {Passed(0, name, cycle.id) for name in EPISODES}
        if not passed <= self.passed:  # once all are passed, it is asked no more
            passed = {Passed(0, name, cycle.id) for name in _kinds_played(session, cycle.id, cycle.target)}
        passed |= {Passed(seq, WATCH_STORED) for seq in _finished(session, ATTRIBUTE, cycle.id)}
        return [*passed, Passed(0, INCUMBENT_STORED, cycle.id)]

    def _has_adapters(self, session: Session, cycle_id: str) -> bool:
        if cycle_id not in self.models and (models := incumbent_models(session, cycle_id)) is not None:
            self.models[cycle_id] = models
        return bool(self.models.get(cycle_id))


def incumbent_models(session: Session, cycle_id: str) -> list[str] | None:
    """Return the adapter versions of a cycle's incumbent, by the event that records it; None without this event."""
    query = select(StageEventRow.detail).where(StageEventRow.cycle_id == cycle_id, StageEventRow.stage == INCUMBENT)
    detail = session.exec(query.order_by(col(StageEventRow.seq)).limit(1)).first()
    return None if detail is None else list(detail["composition"]["models"])


def _finished(session: Session, stage: str, cycle_id: str = "") -> list[int]:
    """Return the numbers of the newest events that a stage has finished, in all cycles or in one."""
    query = select(StageEventRow.seq).where(
        StageEventRow.stage == stage, StageEventRow.state == StageState.FINISHED.value
    )
    if cycle_id:
        query = query.where(StageEventRow.cycle_id == cycle_id)
    return [seq or 0 for seq in session.exec(query.order_by(col(StageEventRow.seq).desc()).limit(RECENT))]


def _kinds_played(session: Session, cycle_id: str, target: str) -> set[str]:
    """Return which of ``EPISODES`` a cycle has."""
    columns = select(TrajectoryRow.source, TrajectoryRow.split, TrajectoryRow.model).distinct()
    names = set()
    for source, split, model in session.exec(columns.where(TrajectoryRow.cycle_id == cycle_id)):
        if model == BASE and (source, split) == (target, "train"):
            names.add(BASE_EPISODE)
        elif model.startswith(REPLAY_PREFIX):
            names.add(REPLAY)
        elif model == INCUMBENT and source != target:  # gates play the same environments, after the watch
            names.add(WATCH_EPISODE)
    return names
