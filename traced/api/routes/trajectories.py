"""Routes for trajectories: pages of summaries, one in full, and the other trials of its task.

A page costs a bounded amount of work whatever the filter (``store.repositories.trajectory_pages``).
"""

from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Query
from sqlmodel import Session

from store.database import read_session
from store.repositories import trajectory_pages as pages
from store.repositories.trajectories import get_trajectory
from store.text import replace_surrogates
from store.types import Outcome, Verdict
from traced.api.control import Control
from traced.client.trajectories import (
    CapabilityLabels,
    FullTrajectory,
    LabelledCycle,
    OutcomeStatement,
    RunLabel,
    TrajectoryChoices,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectorySummary,
)
from traced.scoring.evidence import Labels, effective_outcome

CYCLES, SOURCES, TRIALS = 20, 100, 200  # maximum number of each in a response


def router(control: Control) -> APIRouter:
    """Build the routes."""
    # Ids come from importers too and may hold anything, so they are query parameters and not part of a path.
    router = APIRouter()

    @router.get("/trajectories")
    def page(query: Annotated[TrajectoryQuery, Query()], after: str | None = None) -> TrajectoryPage:
        """A page of trajectories that match the query; ``after`` is the cursor of the previous page."""
        with read_session(control.store) as session:
            by_label = bool(query.cycle or query.capability or query.label)
            cycle = (query.cycle or _newest_labelled_cycle(session)) if by_label else ""
            page_filter = pages.PageFilter(
                outcome=Outcome(query.outcome) if query.outcome else None,
                source=query.source,
                text=query.text.strip(),
                cycle_id=cycle,
                capability=query.capability,
                verdict=Verdict(query.label) if query.label else None,
            )
            matches = pages.trajectory_page(session, page_filter, limit=query.limit, after_id=after)
        return TrajectoryPage(
            rows=[_summary(row) for row in matches.rows],
            next=matches.next,
            looked_at=matches.looked_at,
            gave_up=matches.gave_up,
            cycle_id=cycle,
        )

    @router.get("/trajectories/choices")
    def choices() -> TrajectoryChoices:
        """The values that trajectories can be filtered by."""
        with read_session(control.store) as session:
            cycles = [LabelledCycle(**vars(cycle)) for cycle in pages.labelled_cycles(session, limit=CYCLES)]
            return TrajectoryChoices(sources=pages.sources(session, limit=SOURCES), cycles=cycles)

    @router.get("/trajectory")
    def one(id: str) -> FullTrajectory:
        """A trajectory with its messages, its labels, and the source of its outcome."""
        serving = control.settings.serving
        with read_session(control.store) as session:
            trajectory = get_trajectory(session, id, tokens=False)
            effective = effective_outcome(session, trajectory, Labels(serving.success_labels, serving.failure_labels))
            labels = _labels(session, id)
        values = {name: replace_surrogates(value) for name, value in vars(trajectory).items() if name != "turns"}
        feedback = effective.feedback
        remark = OutcomeStatement(at=feedback.at, who=feedback.who, comment=feedback.comment) if feedback else None
        return FullTrajectory(**values, by=effective.source.value, said=remark, labels=labels)

    @router.get("/trajectory/trials")
    def trials(id: str) -> list[TrajectorySummary]:
        """The other trials of the same task."""
        with read_session(control.store) as session:
            return [_summary(summary) for summary in pages.trials_of(session, id, limit=TRIALS)]

    return router


def _newest_labelled_cycle(session: Session) -> str:
    cycles = pages.labelled_cycles(session, limit=1)
    return cycles[0].cycle_id if cycles else ""


def _summary(summary: pages.Summary) -> TrajectorySummary:
    return TrajectorySummary(**vars(summary) | {"asked": replace_surrogates(summary.asked)})


def _labels(session: Session, trajectory_id: str) -> list[CapabilityLabels]:
    groups = groupby(pages.labels_of(session, trajectory_id), lambda label: (label.cycle_id, label.capability))
    return [
        CapabilityLabels(
            cycle_id=cycle_id,
            capability=capability,
            runs=[
                RunLabel(
                    run=run_label.run,
                    verdict=run_label.verdict,
                    message_index=run_label.message_index,
                    reason=replace_surrogates(run_label.reason),
                    policy=replace_surrogates(run_label.policy),
                )
                for run_label in labels
            ],
        )
        for (cycle_id, capability), labels in groups
    ]
