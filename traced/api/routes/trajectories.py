"""Trajectories: a page of summaries, one in full, the other trials of its task.

Invariants: a page costs a bounded amount of work whatever is asked for (``store.repositories.trajectory_pages``). Ids
are part of the query and not of the path: they come from importers too, and may hold anything.
"""

from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import reading
from store.repositories import trajectory_pages as pages
from store.repositories.trajectories import get_trajectory
from store.text import in_unicode
from store.types import Outcome, Verdict
from traced.api.control import Control
from traced.client.trajectories import (
    CapabilityLabels,
    FullTrajectory,
    LabelledCycle,
    RunLabel,
    Said,
    TrajectoryChoices,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectorySummary,
)
from traced.scoring.evidence import Labels, standing_of

CYCLES, SOURCES, TRIALS = 20, 100, 200  # the most that are told of


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter()

    @router.get("/trajectories")
    def page(asked: Annotated[TrajectoryQuery, Query()], after: str | None = None) -> TrajectoryPage:
        """Those that fit, in a stable order, behind the cursor ``after`` of the page before."""
        with reading(control.store) as opened:
            by_label = bool(asked.cycle or asked.capability or asked.label)
            cycle = (asked.cycle or _newest(opened)) if by_label else ""
            wanted = pages.Wanted(
                outcome=Outcome(asked.outcome) if asked.outcome else None,
                source=asked.source,
                text=asked.text.strip(),
                cycle_id=cycle,
                capability=asked.capability,
                verdict=Verdict(asked.label) if asked.label else None,
            )
            found = pages.trajectory_page(opened, wanted, limit=asked.limit, after=after)
        return TrajectoryPage(
            rows=[_summary(one) for one in found.rows],
            next=found.next,
            looked_at=found.looked_at,
            gave_up=found.gave_up,
            cycle_id=cycle,
        )

    @router.get("/trajectories/choices")
    def choices() -> TrajectoryChoices:
        """What there is to filter by."""
        with reading(control.store) as opened:
            cycles = [LabelledCycle(**vars(one)) for one in pages.labelled_cycles(opened, limit=CYCLES)]
            return TrajectoryChoices(sources=pages.sources(opened, limit=SOURCES), cycles=cycles)

    @router.get("/trajectory")
    def one(id: str) -> FullTrajectory:
        """One with its messages, its labels, and who said how it ended."""
        chosen = control.settings.serving
        with reading(control.store) as opened:
            stored = get_trajectory(opened, id, tokens=False)
            standing = standing_of(opened, stored, Labels(chosen.success_labels, chosen.failure_labels))
            labels = _labels(opened, id)
        values = {name: in_unicode(value) for name, value in vars(stored).items() if name != "turns"}
        told = standing.said
        said = Said(at=told.at, who=told.who, comment=told.comment) if told else None
        return FullTrajectory(**values, by=standing.by.value, said=said, labels=labels)

    @router.get("/trajectory/trials")
    def trials(id: str) -> list[TrajectorySummary]:
        """The other trials of the same task."""
        with reading(control.store) as opened:
            return [_summary(one) for one in pages.trials_of(opened, id, limit=TRIALS)]

    return router


def _newest(opened: Session) -> str:
    newest = pages.labelled_cycles(opened, limit=1)
    return newest[0].cycle_id if newest else ""


def _summary(one: pages.Summary) -> TrajectorySummary:
    return TrajectorySummary(**vars(one) | {"asked": in_unicode(one.asked)})


def _labels(opened: Session, trajectory_id: str) -> list[CapabilityLabels]:
    found = groupby(pages.labels_of(opened, trajectory_id), lambda label: (label.cycle_id, label.capability))
    return [
        CapabilityLabels(
            cycle_id=cycle_id,
            capability=capability,
            runs=[RunLabel(run=one.run, verdict=one.verdict, message_index=one.message_index) for one in said],
        )
        for (cycle_id, capability), said in found
    ]
