"""Capabilities: all of them, one over its cycles, one in a cycle with its labels, and the messages that these cite.

Invariants: a table of labels covers at most ``TRAJECTORIES`` trajectories however many were labelled; messages are read
for one page of cited ones only. Agreement between runs is computed once per capability and cycle, because labels never
change, over the same trajectories. How it fails: the store's ``NotFound``.

What has become of a capability: one word, from its finding, what was made for it, and its adapter versions.

Invariants: what concerns a person or serves customers now comes before what the newest cycle did: a version that waits
for a decision, a training, a trial, a live version; otherwise the newest cycle's last station counts. Nothing is asked
of the store here.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlmodel import Session

from agents.contrast import agreement
from store.database import reading
from store.records import PromotionState, RunState
from store.repositories.capabilities import (
    LabelTable,
    Made,
    Named,
    Told,
    history,
    label_table,
    made_for,
    named_in,
    newest_named,
    told_of,
)
from store.repositories.promotions import list_promotions
from store.repositories.trajectories import get_trajectories
from store.text import in_unicode
from store.types import Label, Message, Outcome, Verdict
from traced.api import queries
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.capabilities import (
    AdapterMark,
    CapabilityHistory,
    CapabilityInCycle,
    CapabilityView,
    Cited,
    CitedMessage,
    FindingView,
    LabelledRow,
    Standing,
)
from traced.client.models import AdapterView

FIRST: tuple[Standing, ...] = ("canary", "shadow", "live")
GATES: dict[str, Standing] = {"fail": "gate failed", "inconclusive": "inconclusive", "none": "to gate"}


def mark(adapter: AdapterView, undone: Standing | None) -> AdapterMark:
    """What has become of a version; ``undone`` says what ended the traffic of an approved one that had some."""
    return AdapterMark(
        name=adapter.name,
        version=int(adapter.name.rpartition("@v")[2]),
        cycle_id=adapter.cycle_id,
        standing=_of_adapter(adapter, undone),
        share=adapter.share,
    )


def _of_adapter(adapter: AdapterView, undone: Standing | None) -> Standing:
    if adapter.live:
        return "live"
    if adapter.trial:
        return "canary" if adapter.trial == "canary" else "shadow"
    if adapter.decision == "rejected":
        return "rejected"
    if adapter.decision == "approved":
        return undone or "approved"
    return GATES.get(adapter.gate, "waiting")


def standing(named: Named, made: Made, adapters: Sequence[AdapterMark]) -> Standing:
    """The word for a capability, as its newest cycle named it, with all adapters that count."""
    of_all = [one.standing for one in adapters]
    if "waiting" in of_all:
        return "waiting"
    if made.training is RunState.RUNNING:
        return "training"
    for word in FIRST:
        if word in of_all:
            return word
    return of_cycle(named, made, [one for one in adapters if one.cycle_id == named.cycle_id])


def of_cycle(named: Named, made: Made, adapters: Sequence[AdapterMark]) -> Standing:
    """The last station that a cycle has come to with a capability; ``adapters`` are the cycle's own, oldest first."""
    if adapters:
        return adapters[-1].standing
    if made.training is not None:
        return "training" if made.training is RunState.RUNNING else "training failed"
    if made.admitted is not None:
        return "admitted" if made.admitted else "refused"
    if made.environment is not None:
        return "environment"
    return "retained" if named.finding is not None and named.finding.retained else "found"


TRAJECTORIES = 1000  # of a table of labels
TEXT = 1000  # characters of a cited message
ORDER = (Outcome.FAILURE, Outcome.SUCCESS, Outcome.INFRASTRUCTURE, Outcome.UNKNOWN)
UNDONE: dict[PromotionState, Standing] = {
    PromotionState.ROLLED_BACK: "rolled back",
    PromotionState.SUPERSEDED: "superseded",
}
Key = tuple[str, str]  # cycle and capability


def router(control: Control) -> APIRouter:
    """Its paths; names are whatever an analyst made up, so they are no part of a path."""
    router = APIRouter()
    known: dict[Key, float | None] = {}

    @router.get("/capabilities")
    def capabilities(limit: Limit = 200) -> list[CapabilityView]:
        """All capabilities, those that the newest cycles named first."""
        with reading(control.store) as opened:
            return _all(opened, limit, known)

    @router.get("/capability")
    def one(name: str, limit: Limit = 100) -> CapabilityHistory:
        """A capability over its cycles, newest first."""
        with reading(control.store) as opened:
            found = history(opened, name, limit=limit)
            marks = _marks(opened).get(name, [])
            made = made_for(opened, [one.cycle_id for one in found])
            findings = [_finding(each, made, marks) for each in found]
            return CapabilityHistory(name=name, title=found[0].capability.title, findings=findings, adapters=marks)

    @router.get("/capability/labels")
    def in_cycle(name: str, cycle: str) -> CapabilityInCycle:
        """Its texts and labels in one cycle."""
        with reading(control.store) as opened:
            named = named_in(opened, name, cycle)
            table = label_table(opened, cycle, name, limit=TRAJECTORIES)
            known[cycle, name] = _agreement(table.labels)
            finding = _finding(named, made_for(opened, [cycle]), _marks(opened).get(name, []), known)
            return CapabilityInCycle(
                **vars(named.capability),
                finding=finding,
                runs=table.runs,
                trajectories=table.trajectories,
                rows=_rows(table, told_of(opened, _ids(table))),
            )

    @router.get("/capability/cited")
    def cited(
        name: str,
        cycle: str,
        limit: Limit = 30,
        offset: Annotated[int, Query(ge=0)] = 0,
        trajectory: str | None = None,
    ) -> Cited:
        """The messages that its labels of a cycle cite, those first that most runs hold to lack it."""
        with reading(control.store) as opened:
            table = label_table(opened, cycle, name, limit=TRAJECTORIES)
            labels = [one for one in table.labels if trajectory in (None, one.trajectory_id)]
            found = _citations(labels, told_of(opened, sorted({one.trajectory_id for one in labels})))
            return Cited(messages=_with_texts(opened, found[offset : offset + limit]), total=len(found))

    return router


def _all(opened: Session, limit: int, known: dict[Key, float | None]) -> list[CapabilityView]:
    found, marks = newest_named(opened, limit=limit), _marks(opened)
    made = made_for(opened, sorted({one.cycle_id for one in found}))
    for one in found:
        if (key := (one.cycle_id, one.capability.name)) not in known:
            table = label_table(opened, *key, limit=TRAJECTORIES)
            if not table.labels:
                continue  # they may come yet
            known[key] = _agreement(table.labels)
    return [
        CapabilityView(
            name=one.capability.name,
            title=one.capability.title,
            standing=standing(one, made.get((one.cycle_id, one.capability.name), Made()), of_it),
            newest=_finding(one, made, of_it, known),
            adapters=of_it,
        )
        for one in found
        for of_it in (marks.get(one.capability.name, []),)
    ]


def _agreement(labels: Sequence[Label]) -> float | None:
    alpha = agreement(labels)
    return None if alpha is None else float(alpha)


def _marks(opened: Session) -> dict[str, list[AdapterMark]]:
    marks: dict[str, list[AdapterMark]] = {}
    for adapter in queries.adapters(opened):
        marks.setdefault(adapter.capability, []).append(mark(adapter, _undone(opened, adapter)))
    return marks


def _undone(opened: Session, adapter: AdapterView) -> Standing | None:
    if adapter.decision != "approved" or adapter.live or adapter.trial:
        return None
    entries = list_promotions(opened, adapter.name)
    return UNDONE.get(entries[-1].state) if entries else None


def _finding(
    named: Named,
    made: dict[Key, Made],
    marks: Sequence[AdapterMark],
    known: dict[Key, float | None] | None = None,
) -> FindingView:
    found, key = named.finding, (named.cycle_id, named.capability.name)
    own = [one for one in marks if one.cycle_id == named.cycle_id]
    return FindingView(
        cycle_id=named.cycle_id,
        at=named.at,
        delta=found.delta if found else None,
        coverage=found.coverage if found else None,
        er_plus=found.er_plus if found else None,
        er_minus=found.er_minus if found else None,
        runs=found.runs if found else 0,
        runs_agreeing=found.runs_agreeing if found else 0,
        retained=bool(found and found.retained),
        standing=of_cycle(named, made.get(key, Made()), own),
        agreement=found.agreement if found and found.agreement is not None else (known or {}).get(key),
    )


def _ids(table: LabelTable) -> list[str]:
    return list(dict.fromkeys(label.trajectory_id for label in table.labels))


def _rows(table: LabelTable, told: dict[str, Told]) -> list[LabelledRow]:
    of: dict[str, dict[int, Label]] = {}
    for label in table.labels:
        of.setdefault(label.trajectory_id, {})[label.run] = label

    def place(key: str) -> tuple[int, int, int, str]:
        verdicts = [label.verdict for label in of[key].values()]
        outcome = ORDER.index(told[key].outcome)
        return outcome, -verdicts.count(Verdict.LACKING), -verdicts.count(Verdict.PRESENT), key

    return [
        LabelledRow(
            trajectory=key,
            source=told[key].source,
            task_id=told[key].task_id,
            trial=told[key].trial,
            outcome=told[key].outcome.value,
            verdicts=[of[key][run].verdict.value if run in of[key] else None for run in table.runs],
            cited=[of[key][run].message_index if run in of[key] else None for run in table.runs],
        )
        for key in sorted(of, key=place)
    ]


def _citations(labels: Sequence[Label], told: dict[str, Told]) -> list[CitedMessage]:
    by_place: dict[tuple[str, int], dict[Verdict, list[int]]] = {}
    for label in labels:
        if label.message_index is not None:
            runs = by_place.setdefault((label.trajectory_id, label.message_index), {})
            runs.setdefault(label.verdict, []).append(label.run)
    found = [
        CitedMessage(
            trajectory=key,
            outcome=told[key].outcome.value,
            index=index,
            role="",
            text="",
            lacking=runs.get(Verdict.LACKING, []),
            present=runs.get(Verdict.PRESENT, []),
        )
        for (key, index), runs in by_place.items()
    ]

    def place(one: CitedMessage) -> tuple[bool, int, int, str, int]:
        outcome = Outcome(one.outcome)
        return not outcome.judged, -len(one.lacking), ORDER.index(outcome), one.trajectory, one.index

    return sorted(found, key=place)


def _with_texts(opened: Session, cited: Sequence[CitedMessage]) -> list[CitedMessage]:
    ids = sorted({one.trajectory for one in cited})
    recorded = {one.id: one.messages for one in get_trajectories(opened, ids, tokens=False)}
    told = []
    for one in cited:
        messages = recorded[one.trajectory]
        if 0 <= one.index < len(messages):
            message = messages[one.index]
            text = _text(message)
            shown = {"role": in_unicode(str(message.get("role", ""))), "text": in_unicode(text[:TEXT])}
            one = one.model_copy(update={**shown, "left_out": max(len(text) - TEXT, 0)})
        told.append(one)
    return told


def _text(message: Message) -> str:
    """What a message says, and the calls that it makes."""
    content, calls = message.get("content"), message.get("tool_calls")
    said = [] if content is None else [content if isinstance(content, str) else _json(content)]
    return "\n".join([*said, *map(_call, calls if isinstance(calls, list) else [])])


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _json(call)
    arguments = function.get("arguments", "")
    return f"→ {function.get('name', '')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
