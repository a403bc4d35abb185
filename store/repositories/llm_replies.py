"""What agents that think have said: a model's replies and their cost, citations, faults, prompt patches.

Invariants: a reply is found by the hash of its request, whichever cycle paid for it; replies are only added, and the
first of a key stays. Citations and faults are evidence and never change within a cycle.
Fails: ``StoreConflict`` when others are stored under the same key; ``BrokenReference`` for what they refer to.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

import sqlalchemy
from sqlalchemy import case
from sqlmodel import Session, col, func, select

from store.content import insert_new
from store.errors import StoreConflict
from store.records import Citation, FaultRecord, ModelReply, PromptPatch
from store.tables import CitationRow, FaultRow, ModelReplyRow, PromptPatchRow
from store.text import free, in_unicode


@dataclass(frozen=True)
class StageCost:
    """What the replies to one stage of a cycle took, for one capability ("" where it was for none).

    ``estimated``: of how many replies the tokens are estimates.
    """

    cycle_id: str
    stage: str
    capability: str
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    seconds: float
    estimated: int


def save_reply(session: Session, reply: ModelReply) -> None:
    """Keep a reply; one that is there under its key stays as it is."""
    insert_new(session, ModelReplyRow, [asdict(reply) | {"said": in_unicode(reply.said)}])


def find_reply(session: Session, key: str) -> ModelReply | None:
    """The reply to the request of this hash, None where nobody has sent it."""
    row = session.get(ModelReplyRow, key)
    return None if row is None else ModelReply(**row.model_dump())


def list_replies(session: Session, cycle_id: str, *, stage: str | None = None) -> list[ModelReply]:
    """The replies that a cycle paid for, oldest first."""
    query = select(ModelReplyRow).where(ModelReplyRow.cycle_id == cycle_id)
    if stage is not None:
        query = query.where(ModelReplyRow.stage == stage)
    ordered = query.order_by(col(ModelReplyRow.at), col(ModelReplyRow.key))
    return [ModelReply(**row.model_dump()) for row in session.exec(ordered)]


def stage_costs(session: Session, cycle_id: str, *, stage: str | None = None) -> list[StageCost]:
    """What a cycle's replies took, by stage and capability."""
    row = ModelReplyRow
    key = (col(row.cycle_id), col(row.stage), col(row.capability))
    figures = (col(row.prompt_tokens), col(row.completion_tokens), col(row.cost), col(row.seconds))
    sums = [func.sum(figure) for figure in (*figures, case((col(row.estimated), 1), else_=0))]
    query = sqlalchemy.select(*key, func.count(), *sums).where(col(row.cycle_id) == cycle_id)
    if stage is not None:
        query = query.where(col(row.stage) == stage)
    return [
        StageCost(
            cycle, stage, capability, calls, int(prompt), int(completion), float(cost), float(seconds), int(about)
        )
        for cycle, stage, capability, calls, prompt, completion, cost, seconds, about in session.execute(
            query.group_by(*key).order_by(*key)
        )
    ]


def save_citations(session: Session, citations: Iterable[Citation]) -> None:
    """Store what capabilities rest on; these come first."""
    offered = list(citations)
    for cycle_id in sorted({citation.cycle_id for citation in offered}):
        stored = {(one.capability, one.position): one for one in list_citations(session, cycle_id)}
        for citation in offered:
            found = stored.get((citation.capability, citation.position), citation)
            if citation.cycle_id == cycle_id and found != citation:
                raise _conflict(cycle_id, found, citation)
    insert_new(session, CitationRow, [asdict(citation) for citation in offered])


def list_citations(session: Session, cycle_id: str, *, capability: str | None = None) -> list[Citation]:
    """A cycle's citations by capability and position."""
    query = select(CitationRow).where(CitationRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(CitationRow.capability == capability)
    ordered = query.order_by(col(CitationRow.capability), col(CitationRow.position))
    return [Citation(**row.model_dump()) for row in session.exec(ordered)]


def save_faults(session: Session, faults: Iterable[FaultRecord]) -> None:
    """Store whose fault failures were."""
    offered = [replace(fault, reason=free(fault.reason)) for fault in faults]
    for cycle_id in sorted({fault.cycle_id for fault in offered}):
        stored = {one.trajectory_id: one for one in list_faults(session, cycle_id)}
        for fault in offered:
            found = stored.get(fault.trajectory_id, fault)
            if fault.cycle_id == cycle_id and found != fault:
                raise _conflict(cycle_id, found, fault)
    insert_new(session, FaultRow, [asdict(fault) for fault in offered])


def list_faults(session: Session, cycle_id: str) -> list[FaultRecord]:
    """A cycle's faults by trajectory."""
    query = select(FaultRow).where(FaultRow.cycle_id == cycle_id).order_by(col(FaultRow.trajectory_id))
    return [FaultRecord(**row.model_dump()) for row in session.exec(query)]


def save_patch(session: Session, patch: PromptPatch) -> str:
    """Store a prompt patch; returns its id. The same text for the same capability and cycle has its newest figures."""
    safe = replace(patch, text=free(patch.text), figures=in_unicode(patch.figures))
    session.merge(PromptPatchRow(id=safe.id, **asdict(safe)))
    session.flush()
    return safe.id


def hold_patch(session: Session, patch_id: str) -> None:
    """Until the end of the transaction nobody else holds this patch (SQLite has one writer anyway)."""
    session.exec(select(PromptPatchRow.id).where(PromptPatchRow.id == patch_id).with_for_update()).all()


def list_patches(session: Session, *, cycle_id: str | None = None, capability: str | None = None) -> list[PromptPatch]:
    """Prompt patches (of a cycle, of a capability), oldest first."""
    query = select(PromptPatchRow)
    if cycle_id is not None:
        query = query.where(PromptPatchRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(PromptPatchRow.capability == capability)
    ordered = query.order_by(col(PromptPatchRow.at), col(PromptPatchRow.id))
    return [PromptPatch(**row.model_dump(exclude={"id"})) for row in session.exec(ordered)]


def _conflict(cycle_id: str, stored: object, offered: object) -> StoreConflict:
    return StoreConflict(f"cycle {cycle_id!r} has {stored} stored, refusing {offered}; analyse again in a new cycle")
