"""Compare a cycle's checkpoint with the store before the cycle is continued.

On SQLite they are two databases: after a restore of one of them, or on a disk that lost its last writes, the checkpoint
may say that a stage is done whose rows do not exist. Continued as it stands, such a cycle would skip the stage, or end
as finished without labels. Its checkpoints are deleted instead, and the graph begins anew: stages whose rows exist
return what they have stored, so the work goes on at the first stage without rows.

Invariants: a stage counts as done if the store has its closing event, or an attempt with its answer. Both are committed
after the stage's rows in the same database, so the rows exist. A checkpoint that is behind its rows is left as it is. A
cycle that has ended in the store is not touched. Not covered: rows that were deleted one by one.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from langgraph.types import StateSnapshot
from sqlmodel import Session, select

from store.database import read_session, write_session
from store.records import Event, StageState
from store.repositories.attempts import AttemptState
from store.repositories.cycles import ENDED_STATES, get_cycle, list_stage_events
from store.repositories.events import save_event
from store.service_tables import AttemptRow
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE
from traced.pipeline.evaluate import ROUTE, stage_of
from traced.pipeline.graph import CycleGraph, checkpoint_of, cycle_status, forget_checkpoints
from traced.pipeline.stages import PROMPT

WENT_BACK = "cycle went back"
END = "end"
NODES = ("collect", "analyze", "attribute", "capability", "compose", "approval", "promote", "evaluate", "report")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """A stage that a checkpoint says was done ``count`` times, and the names under which the store may record it."""

    stage: str
    capability: str = ""
    count: int = 1
    names: tuple[str, ...] = ()

    def holds(self, done: Mapping[tuple[str, str], int]) -> bool:
        """Whether the store has the stage as often as the checkpoint."""
        return sum(done[name, self.capability] for name in self.names or (self.stage,)) >= self.count

    def __str__(self) -> str:
        return f"{self.stage} {self.capability}".strip()


async def reconcile(graph: CycleGraph, context: Context) -> str:
    """Delete the checkpoints of the context's cycle if they are ahead of its rows; call it before ``advance``.

    Returns:
        The stage to which the cycle went back, "" if it continues as it stands.

    Raises:
        CycleChanged: The checkpoint cannot be read, or is of another version of the graph.
        StoreError: The store does not answer.
    """
    cycle_id = context.cycle_id
    if not (await cycle_status(graph, cycle_id)).started:
        return ""
    snapshot = await checkpoint_of(graph, cycle_id)
    claims = list(claims_of(snapshot, prompt_first=context.settings.training.prompt_first))
    done = await asyncio.to_thread(_done_stages, context)
    missing = None if done is None else next((claim for claim in claims if not claim.holds(done)), None)
    if missing is None:
        return ""
    position = [*NODES, END][_position(snapshot)]
    log.warning("cycle %s goes back from %s to %s, whose rows the store does not have", cycle_id, position, missing)
    await forget_checkpoints(graph, cycle_id)
    await asyncio.to_thread(_save_event, context, {"from": position, "to": str(missing)})
    return str(missing)


def claims_of(snapshot: StateSnapshot, *, prompt_first: bool) -> Iterator[Claim]:
    """Yield what the checkpoint says was done, in the order of the graph."""
    values = snapshot.values
    position = _position(snapshot)
    capabilities = values.get("capabilities", [])
    for stage in NODES[: min(position, 2)]:
        yield Claim(stage)
    if position == NODES.index("capability"):
        for task in snapshot.tasks:
            yield from _claims_of_capability(task.state, task.result, prompt_first)
    if position > NODES.index("capability"):
        for capability in capabilities:
            yield _outcome_of(capability)
    # Without a capability the report follows the analysis.
    if position > NODES.index("compose") and capabilities:
        yield Claim("compose")
    if position > NODES.index("promote") and capabilities:
        yield Claim("promote")
    if position > NODES.index("evaluate") and capabilities:
        # Where one adapter answers for all, no router is evaluated.
        last = (ROUTE, *map(stage_of, values["promoted"])) if values.get("promoted") else (stage_of(BASE),)
        yield Claim("evaluate", names=("evaluate", *last))
    if position > NODES.index("report"):
        yield Claim("report")


def _position(snapshot: StateSnapshot) -> int:
    """Return the index of the node to run next, the number of nodes if there is none."""
    # Before the first node, the next one is LangGraph's own.
    pending = [NODES.index(name) if name in NODES else 0 for name in snapshot.next]
    # Nodes that have finished while the checkpoint after them was not written any more.
    done = [NODES.index(task.name) + 1 if task.name in NODES else 0 for task in snapshot.tasks]
    return min(pending or done, default=len(NODES))


def _outcome_of(capability: str) -> Claim:
    # It has passed its gate, or was dropped, which is recorded as a failure.
    return Claim("gate", capability, names=("gate", StageState.FAILED.value))


def _claims_of_capability(state: Any, result: Any, prompt_first: bool) -> Iterator[Claim]:
    """Yield the claims of one capability's subgraph; ``state`` is None before its first checkpoint."""
    if not isinstance(state, StateSnapshot) or "capability" not in state.values:
        return
    capability, attempts = state.values["capability"], state.values.get("attempt", 0)
    if result is not None or not state.tasks:
        yield _outcome_of(capability)
        return
    node = state.tasks[0].name
    if attempts:
        yield Claim("synthesize", capability, attempts)
    # Without a next node, this one has finished, but the checkpoint after it was not written any more.
    admissions = attempts if state.next and node != "admit" else attempts - 1
    if admissions > 0:
        yield Claim("admit", capability, admissions)
    if node in ("train", "gate") and prompt_first:
        yield Claim(PROMPT, capability)
    if node == "gate":
        yield Claim("train", capability)


def _done_stages(context: Context) -> Counter[tuple[str, str]] | None:
    """Return how often the store has each stage and capability of the cycle as done; None if the cycle has ended."""
    with read_session(context.store) as session:
        if get_cycle(session, context.cycle_id).state in ENDED_STATES:
            return None
        closed = _closed_stages(session, context.cycle_id)
        query = select(AttemptRow.stage, AttemptRow.capability).where(
            AttemptRow.cycle_id == context.cycle_id, AttemptRow.state == AttemptState.FINISHED.value
        )
        attempts = Counter((stage, capability) for stage, capability in session.exec(query))
    return closed | attempts


def _closed_stages(session: Session, cycle_id: str) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for event in list_stage_events(session, cycle_id):
        if event.state is StageState.FINISHED:
            counts[event.stage, event.capability or ""] += 1
        elif event.state is StageState.FAILED and event.capability:
            counts[StageState.FAILED.value, event.capability] += 1
    return counts


def _save_event(context: Context, detail: dict[str, Any]) -> None:
    with write_session(context.store) as session:
        save_event(session, Event(context.now(), WENT_BACK, context.cycle_id, context.cycle_id, detail))
