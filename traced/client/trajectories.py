"""Models and requests for trajectories: pages of summaries, one in full, and the other trials of its task."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from traced.client.models import Model
from traced.client.transport import Transport

OutcomeName = Literal["success", "failure", "infrastructure", "unknown"]
VerdictName = Literal["lacking", "present", "na"]


class TrajectoryQuery(Model):
    """What is asked for; "" and None leave a property open. Without a cycle labels are the newest labelled one's."""

    outcome: OutcomeName | None = None
    source: str = ""
    text: str = Field(default="", max_length=500, description="part of a message, the id, the task or the model")
    cycle: str = Field(default="", description="only trajectories labelled in this cycle")
    capability: str = ""
    label: VerdictName | None = Field(default=None, description="verdict of at least one labelling run")
    limit: int = Field(default=100, ge=1, le=200)


EVERYTHING = TrajectoryQuery()


class TrajectorySummary(Model):
    """A trajectory in a line."""

    id: str
    source: str
    split: str
    task_id: str
    trial: int
    model: str
    outcome: str
    reward: float
    end_cause: str
    cycle_id: str | None
    started_at: datetime | None = Field(default=None, description="start; null if the source does not say")
    messages: int = Field(description="number of messages")
    asked: str = Field(description="the first words of the user")
    verdicts: dict[str, int] = Field(
        default={}, description="labelling runs per verdict, for the capability of the query"
    )


class TrajectoryPage(Model):
    """Some of what fits, in a stable order; ``next`` goes on from its end, None where nothing comes."""

    rows: list[TrajectorySummary]
    next: str | None
    looked_at: int = Field(description="trajectories searched for these rows")
    gave_up: bool = Field(description="the search limit was reached; matches may follow after ``next``")
    cycle_id: str = Field(description="the cycle whose labels are shown; empty without labels")


class LabelledCycle(Model):
    """A cycle that has capabilities, and their names."""

    cycle_id: str
    capabilities: list[str]


class TrajectoryChoices(Model):
    """What there is to filter by, cycles newest first."""

    sources: list[str]
    cycles: list[LabelledCycle]


class RunLabel(Model):
    """What one run said, and the message that it cites; ``policy`` is a broken sentence of the policy."""

    run: int
    verdict: str
    message_index: int | None
    reason: str = ""
    policy: str = ""


class CapabilityLabels(Model):
    """What all runs of a cycle said of one capability in a trajectory."""

    cycle_id: str
    capability: str
    runs: list[RunLabel]


class OutcomeStatement(Model):
    """What decided an outcome."""

    at: datetime
    who: str
    comment: str


class FullTrajectory(Model):
    """One trajectory with all that is known of it; ``by``: people, rules, judge, source or nobody."""

    id: str
    source: str
    split: str
    task_id: str
    trial: int
    model: str
    temperature: float
    messages: list[Any]
    tools: list[Any]
    reward: float
    outcome: str
    end_cause: str
    parts: dict[str, float | None]
    detail: str
    cycle_id: str | None
    started_at: datetime | None = Field(default=None, description="start; null if the source does not say")
    customer: str = Field(default="", description="keyed hash of the customer's name; empty without one")
    by: str
    said: OutcomeStatement | None
    labels: list[CapabilityLabels]


class Trajectories:
    """Requests for trajectories."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def page(self, query: TrajectoryQuery = EVERYTHING, *, after: str | None = None) -> TrajectoryPage:
        """Return a page of the trajectories that match the query; ``after`` is ``next`` of the previous page."""
        return await self._daemon.get("/trajectories", TrajectoryPage, after=after, **query.model_dump())

    async def choices(self) -> TrajectoryChoices:
        """Return the values that trajectories can be filtered by."""
        return await self._daemon.get("/trajectories/choices", TrajectoryChoices)

    async def get(self, trajectory_id: str) -> FullTrajectory:
        """Return a trajectory in full."""
        return await self._daemon.get("/trajectory", FullTrajectory, id=trajectory_id)

    async def trials(self, trajectory_id: str) -> list[TrajectorySummary]:
        """Return the other trials of the same task."""
        return await self._daemon.list("/trajectory/trials", TrajectorySummary, id=trajectory_id)
