"""Routes for capabilities: the list, one in all its cycles, its labels in a cycle, and the messages that labels cite.

Invariants: a label table covers at most ``TRAJECTORIES`` trajectories; messages are read for one page of citations.
How it fails: the store's ``NotFound``.
"""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from agents.contrast import agreement
from store.database import read_session
from store.records import PromotionState, RunState
from store.repositories.capabilities import (
    CapabilityEntry,
    CapabilityOutputs,
    LabelTable,
    TrajectoryHeader,
    get_capability_entry,
    label_table,
    list_capability_entries,
    newest_capabilities,
    outputs_of_cycles,
    trajectory_headers,
)
from store.repositories.promotions import list_promotions
from store.repositories.trajectories import get_trajectories
from store.text import replace_surrogates
from store.types import Label, Outcome, Verdict, awaits_decision
from traced.api import queries
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.capabilities import (
    AdapterMark,
    CapabilityHistory,
    CapabilityInCycle,
    CapabilityStatus,
    CapabilityView,
    CitedMessage,
    CitedMessages,
    FindingView,
    LabelledRow,
)
from traced.client.models import AdapterView
from traced.evaluation.examples import message_text

FIRST: tuple[CapabilityStatus, ...] = ("canary", "shadow", "live")
GATES: dict[str, CapabilityStatus] = {"fail": "gate failed", "inconclusive": "inconclusive", "none": "to gate"}


def mark(adapter: AdapterView, undone: CapabilityStatus | None) -> AdapterMark:
    """Return the state of an adapter version; ``undone`` is how the traffic of an approved version ended."""
    return AdapterMark(
        name=adapter.name,
        version=int(adapter.name.rpartition("@v")[2]),
        cycle_id=adapter.cycle_id,
        standing=_adapter_status(adapter, undone),
        share=adapter.share,
    )


def _adapter_status(adapter: AdapterView, undone: CapabilityStatus | None) -> CapabilityStatus:
    if adapter.live:
        return "live"
    if adapter.trial:
        return "canary" if adapter.trial == "canary" else "shadow"
    if adapter.decision == "rejected":
        return "rejected"
    if adapter.decision == "approved":
        return undone or "approved"
    waits = awaits_decision(adapter.gate, decided=adapter.decision != "none")
    return "waiting" if waits else GATES[adapter.gate]


def capability_status(
    entry: CapabilityEntry, outputs: CapabilityOutputs, adapters: Sequence[AdapterMark]
) -> CapabilityStatus:
    """Return the state of a capability over all its adapter versions."""
    # A state that needs a person or serves users has priority; otherwise the last stage of the newest cycle counts.
    states = [adapter.standing for adapter in adapters]
    if "waiting" in states:
        return "waiting"
    if outputs.training is RunState.RUNNING:
        return "training"
    for state in FIRST:
        if state in states:
            return state
    return of_cycle(entry, outputs, [adapter for adapter in adapters if adapter.cycle_id == entry.cycle_id])


def of_cycle(entry: CapabilityEntry, outputs: CapabilityOutputs, adapters: Sequence[AdapterMark]) -> CapabilityStatus:
    """Return the last stage that a cycle reached with a capability; ``adapters`` are of this cycle, oldest first."""
    if adapters:
        return adapters[-1].standing
    if outputs.training is not None:
        return "training" if outputs.training is RunState.RUNNING else "training failed"
    if outputs.is_admitted is not None:
        return "admitted" if outputs.is_admitted else "refused"
    if outputs.environment is not None:
        return "environment"
    return "retained" if entry.finding is not None and entry.finding.retained else "found"


TRAJECTORIES = 1000  # maximum number in a table of labels
TEXT = 1000  # maximum characters of a cited message
ORDER = (Outcome.FAILURE, Outcome.SUCCESS, Outcome.INFRASTRUCTURE, Outcome.UNKNOWN)
UNDONE: dict[PromotionState, CapabilityStatus] = {
    PromotionState.ROLLED_BACK: "rolled back",
    PromotionState.SUPERSEDED: "superseded",
}
Key = tuple[str, str]  # cycle and capability


def router(control: Control) -> APIRouter:
    """Build the routes."""
    # Capability names are free text, so they are query parameters and not part of a path.
    router = APIRouter()
    # Labels never change, so the agreement of a cycle's runs is computed once.
    agreements: dict[Key, float | None] = {}

    @router.get("/capabilities")
    def capabilities(limit: Limit = 200) -> list[CapabilityView]:
        """All capabilities; those of the newest cycles come first."""
        with read_session(control.store) as session:
            return _capability_views(session, limit, agreements)

    @router.get("/capability")
    def one(name: str, limit: Limit = 100) -> CapabilityHistory:
        """The findings of a capability in all its cycles, newest first."""
        with read_session(control.store) as session:
            entries = list_capability_entries(session, name, limit=limit)
            marks = _marks(session).get(name, [])
            outputs = outputs_of_cycles(session, [item.cycle_id for item in entries])
            findings = [_finding(item, outputs, marks) for item in entries]
            return CapabilityHistory(name=name, title=entries[0].capability.title, findings=findings, adapters=marks)

    @router.get("/capability/labels")
    def in_cycle(name: str, cycle: str) -> CapabilityInCycle:
        """The texts and labels of a capability in one cycle."""
        with read_session(control.store) as session:
            entry = get_capability_entry(session, name, cycle)
            table = label_table(session, cycle, name, limit=TRAJECTORIES)
            agreements[cycle, name] = _agreement(table.labels)
            finding = _finding(entry, outputs_of_cycles(session, [cycle]), _marks(session).get(name, []), agreements)
            return CapabilityInCycle(
                **vars(entry.capability),
                finding=finding,
                runs=table.runs,
                trajectories=table.trajectories,
                rows=_rows(table, trajectory_headers(session, _ids(table))),
            )

    @router.get("/capability/cited")
    def cited(
        name: str,
        cycle: str,
        limit: Limit = 30,
        offset: Annotated[int, Query(ge=0)] = 0,
        trajectory: str | None = None,
    ) -> CitedMessages:
        """The messages cited by the labels of a capability in a cycle; most frequently lacking first."""
        with read_session(control.store) as session:
            table = label_table(session, cycle, name, limit=TRAJECTORIES)
            labels = [label for label in table.labels if trajectory in (None, label.trajectory_id)]
            citations = _citations(
                labels, trajectory_headers(session, sorted({label.trajectory_id for label in labels}))
            )
            return CitedMessages(
                messages=_with_texts(session, citations[offset : offset + limit]), total=len(citations)
            )

    return router


def _capability_views(session: Session, limit: int, agreements: dict[Key, float | None]) -> list[CapabilityView]:
    entries, marks = newest_capabilities(session, limit=limit), _marks(session)
    outputs = outputs_of_cycles(session, sorted({entry.cycle_id for entry in entries}))
    for entry in entries:
        if (key := (entry.cycle_id, entry.capability.name)) not in agreements:
            table = label_table(session, *key, limit=TRAJECTORIES)
            if not table.labels:
                # Not cached: a running cycle may still store its labels.
                continue
            agreements[key] = _agreement(table.labels)
    return [
        CapabilityView(
            name=entry.capability.name,
            title=entry.capability.title,
            standing=capability_status(
                entry, outputs.get((entry.cycle_id, entry.capability.name), CapabilityOutputs()), adapter_marks
            ),
            newest=_finding(entry, outputs, adapter_marks, agreements),
            adapters=adapter_marks,
        )
        for entry in entries
        for adapter_marks in (marks.get(entry.capability.name, []),)
    ]


def _agreement(labels: Sequence[Label]) -> float | None:
    alpha = agreement(labels)
    return None if alpha is None else float(alpha)


def _marks(session: Session) -> dict[str, list[AdapterMark]]:
    marks: dict[str, list[AdapterMark]] = {}
    for adapter in queries.adapters(session):
        marks.setdefault(adapter.capability, []).append(mark(adapter, _end_of_traffic(session, adapter)))
    return marks


def _end_of_traffic(session: Session, adapter: AdapterView) -> CapabilityStatus | None:
    if adapter.decision != "approved" or adapter.live or adapter.trial:
        return None
    promotions = list_promotions(session, adapter.name)
    return UNDONE.get(promotions[-1].state) if promotions else None


def _finding(
    entry: CapabilityEntry,
    outputs: dict[Key, CapabilityOutputs],
    marks: Sequence[AdapterMark],
    agreements: dict[Key, float | None] | None = None,
) -> FindingView:
    finding, key = entry.finding, (entry.cycle_id, entry.capability.name)
    cycle_marks = [adapter for adapter in marks if adapter.cycle_id == entry.cycle_id]
    return FindingView(
        cycle_id=entry.cycle_id,
        at=entry.at,
        delta=finding.delta if finding else None,
        basis=finding.basis if finding else "",
        coverage=finding.coverage if finding else None,
        er_plus=finding.er_plus if finding else None,
        er_minus=finding.er_minus if finding else None,
        runs=finding.runs if finding else 0,
        runs_agreeing=finding.runs_agreeing if finding else 0,
        retained=bool(finding and finding.retained),
        standing=of_cycle(entry, outputs.get(key, CapabilityOutputs()), cycle_marks),
        agreement=finding.agreement if finding and finding.agreement is not None else (agreements or {}).get(key),
    )


def _ids(table: LabelTable) -> list[str]:
    return list(dict.fromkeys(label.trajectory_id for label in table.labels))


def _rows(table: LabelTable, headers: dict[str, TrajectoryHeader]) -> list[LabelledRow]:
    by_trajectory: dict[str, dict[int, Label]] = {}
    for label in table.labels:
        by_trajectory.setdefault(label.trajectory_id, {})[label.run] = label

    def sort_key(key: str) -> tuple[int, int, int, str]:
        verdicts = [label.verdict for label in by_trajectory[key].values()]
        outcome = ORDER.index(headers[key].outcome)
        return outcome, -verdicts.count(Verdict.LACKING), -verdicts.count(Verdict.PRESENT), key

    return [
        LabelledRow(
            trajectory=key,
            source=headers[key].source,
            task_id=headers[key].task_id,
            trial=headers[key].trial,
            outcome=headers[key].outcome.value,
            verdicts=[
                by_trajectory[key][run].verdict.value if run in by_trajectory[key] else None for run in table.runs
            ],
            cited=[by_trajectory[key][run].message_index if run in by_trajectory[key] else None for run in table.runs],
        )
        for key in sorted(by_trajectory, key=sort_key)
    ]


def _citations(labels: Sequence[Label], headers: dict[str, TrajectoryHeader]) -> list[CitedMessage]:
    by_place: dict[tuple[str, int], dict[Verdict, list[int]]] = {}
    reasons: dict[tuple[str, int, Verdict], Label] = {}
    for label in labels:
        if label.message_index is not None:
            runs = by_place.setdefault((label.trajectory_id, label.message_index), {})
            runs.setdefault(label.verdict, []).append(label.run)
            if label.reason:
                reasons.setdefault((label.trajectory_id, label.message_index, label.verdict), label)
    citations = [
        _with_reason(
            reasons.get((key, index, max(runs, key=lambda verdict: len(runs[verdict])))),
            CitedMessage(
                trajectory=key,
                outcome=headers[key].outcome.value,
                index=index,
                role="",
                text="",
                lacking=runs.get(Verdict.LACKING, []),
                present=runs.get(Verdict.PRESENT, []),
            ),
        )
        for (key, index), runs in by_place.items()
    ]

    def sort_key(citation: CitedMessage) -> tuple[bool, int, int, str, int]:
        outcome = Outcome(citation.outcome)
        return not outcome.is_judged, -len(citation.lacking), ORDER.index(outcome), citation.trajectory, citation.index

    return sorted(citations, key=sort_key)


def _with_reason(label: Label | None, citation: CitedMessage) -> CitedMessage:
    if label is None:
        return citation
    return citation.model_copy(update=replace_surrogates({"reason": label.reason, "policy": label.policy}))


def _with_texts(session: Session, citations: Sequence[CitedMessage]) -> list[CitedMessage]:
    ids = sorted({citation.trajectory for citation in citations})
    transcripts = {citation.id: citation.messages for citation in get_trajectories(session, ids, tokens=False)}
    views = []
    for citation in citations:
        messages = transcripts[citation.trajectory]
        if 0 <= citation.index < len(messages):
            message = messages[citation.index]
            text = message_text(message)
            fields = {"role": replace_surrogates(str(message.get("role", ""))), "text": replace_surrogates(text[:TEXT])}
            citation = citation.model_copy(update={**fields, "left_out": max(len(text) - TEXT, 0)})
        views.append(citation)
    return views
