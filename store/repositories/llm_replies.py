"""Replies of the language model and their cost, and results of the agents: citations, faults, prompt patches.

Invariants: a reply is stored once per hash of its request, under the cycle that paid for it. Citations and faults are
evidence and never change within a cycle.
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
from store.text import replace_surrogates, storable_text


@dataclass(frozen=True)
class StageCost:
    """The cost of the replies to one stage of a cycle, for one capability ("" for requests without one).

    ``estimated`` is the number of replies whose token counts are estimates.
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
    """Store a reply; an existing reply with the same key is kept."""
    insert_new(session, ModelReplyRow, [asdict(reply) | {"said": replace_surrogates(reply.said)}])


def find_reply(session: Session, key: str) -> ModelReply | None:
    """Return the stored reply to the request with hash ``key``, None if there is none."""
    row = session.get(ModelReplyRow, key)
    return None if row is None else ModelReply(**row.model_dump())


def list_replies(session: Session, cycle_id: str, *, stage: str | None = None) -> list[ModelReply]:
    """Return the replies that a cycle paid for, oldest first."""
    query = select(ModelReplyRow).where(ModelReplyRow.cycle_id == cycle_id)
    if stage is not None:
        query = query.where(ModelReplyRow.stage == stage)
    query = query.order_by(col(ModelReplyRow.at), col(ModelReplyRow.key))
    return [ModelReply(**row.model_dump()) for row in session.exec(query)]


def stage_costs(session: Session, cycle_id: str, *, stage: str | None = None) -> list[StageCost]:
    """Return the cost of a cycle's replies, one entry per stage and capability, in this order."""
    row = ModelReplyRow
    key = (col(row.cycle_id), col(row.stage), col(row.capability))
    figures = (col(row.prompt_tokens), col(row.completion_tokens), col(row.cost), col(row.seconds))
    sums = [func.sum(figure) for figure in (*figures, case((col(row.estimated), 1), else_=0))]
    query = sqlalchemy.select(*key, func.count(), *sums).where(col(row.cycle_id) == cycle_id)
    if stage is not None:
        query = query.where(col(row.stage) == stage)
    return [
        StageCost(
            cycle, stage, capability, calls, int(prompt), int(completion), float(cost), float(seconds), int(estimated)
        )
        for cycle, stage, capability, calls, prompt, completion, cost, seconds, estimated in session.execute(
            query.group_by(*key).order_by(*key)
        )
    ]


def save_citations(session: Session, citations: Iterable[Citation]) -> None:
    """Store citations; their capabilities must be stored first.

    Raises:
        StoreConflict: another citation is stored for the cycle, capability and position.
    """
    new = list(citations)
    for cycle_id in sorted({citation.cycle_id for citation in new}):
        existing = {(item.capability, item.position): item for item in list_citations(session, cycle_id)}
        for citation in new:
            existing_citation = existing.get((citation.capability, citation.position), citation)
            if citation.cycle_id == cycle_id and existing_citation != citation:
                raise _conflict(cycle_id, existing_citation, citation)
    insert_new(session, CitationRow, [asdict(citation) for citation in new])


def list_citations(session: Session, cycle_id: str, *, capability: str | None = None) -> list[Citation]:
    """Return the citations of a cycle, ordered by capability and position."""
    query = select(CitationRow).where(CitationRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(CitationRow.capability == capability)
    query = query.order_by(col(CitationRow.capability), col(CitationRow.position))
    return [Citation(**row.model_dump()) for row in session.exec(query)]


def save_faults(session: Session, faults: Iterable[FaultRecord]) -> None:
    """Store fault attributions; raises ``StoreConflict`` if the cycle has another one for a trajectory."""
    # Characters that the database cannot store are replaced, so compare the text in its stored form.
    new = [replace(fault, reason=storable_text(fault.reason)) for fault in faults]
    for cycle_id in sorted({fault.cycle_id for fault in new}):
        existing = {item.trajectory_id: item for item in list_faults(session, cycle_id)}
        for fault in new:
            existing_fault = existing.get(fault.trajectory_id, fault)
            if fault.cycle_id == cycle_id and existing_fault != fault:
                raise _conflict(cycle_id, existing_fault, fault)
    insert_new(session, FaultRow, [asdict(fault) for fault in new])


def list_faults(session: Session, cycle_id: str) -> list[FaultRecord]:
    """Return the fault attributions of a cycle, ordered by trajectory id."""
    query = select(FaultRow).where(FaultRow.cycle_id == cycle_id).order_by(col(FaultRow.trajectory_id))
    return [FaultRecord(**row.model_dump()) for row in session.exec(query)]


def save_patch(session: Session, patch: PromptPatch) -> str:
    """Store a prompt patch and return its id; figures and time of a stored patch with this id are replaced."""
    safe = replace(patch, text=storable_text(patch.text), figures=replace_surrogates(patch.figures))
    session.merge(PromptPatchRow(id=safe.id, **asdict(safe)))
    session.flush()
    return safe.id


def lock_patch(session: Session, patch_id: str) -> None:
    """Lock a prompt patch until the end of the transaction."""
    # SQLite ignores FOR UPDATE; its single writer gives the same guarantee.
    session.exec(select(PromptPatchRow.id).where(PromptPatchRow.id == patch_id).with_for_update()).all()


def list_patches(session: Session, *, cycle_id: str | None = None, capability: str | None = None) -> list[PromptPatch]:
    """Return prompt patches (of a cycle and a capability, if given), oldest first."""
    query = select(PromptPatchRow)
    if cycle_id is not None:
        query = query.where(PromptPatchRow.cycle_id == cycle_id)
    if capability is not None:
        query = query.where(PromptPatchRow.capability == capability)
    query = query.order_by(col(PromptPatchRow.at), col(PromptPatchRow.id))
    return [PromptPatch(**row.model_dump(exclude={"id"})) for row in session.exec(query)]


def _conflict(cycle_id: str, existing: object, new: object) -> StoreConflict:
    return StoreConflict(f"cycle {cycle_id!r} has {existing} stored, refusing {new}; analyse again in a new cycle")
