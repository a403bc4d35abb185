"""Models and requests for training runs: state, metrics by iteration, and sample rollouts."""

from datetime import datetime
from typing import Any

from pydantic import Field

from traced.client.models import Done, Model, Reason
from traced.client.transport import Transport, part

PAGE = 1000  # iterations per response


class TrainingView(Model):
    """One run: ``done`` of at most ``iterations`` are over; ``at_work`` while this service has it running."""

    id: str
    cycle_id: str
    capability: str
    environment: str
    model: str
    state: str
    at_work: bool
    started_at: datetime
    finished_at: datetime | None
    iterations: int | None
    done: int
    first: dict[str, float | None] = Field(default={})
    last: dict[str, float | None] = Field(default={})
    left_s: float | None = None
    rollouts: int = 0
    detail: str = ""
    adapter: str = ""


class IterationView(Model):
    """The figures of one iteration; None for one that is no number."""

    iteration: int
    figures: dict[str, float | None]


class SampleView(Model):
    """A rollout of the newest iteration: the ``place`` in its group, and what was said, bounded."""

    iteration: int
    place: str
    seed: int
    reward: float
    success: bool
    turns: int
    messages: list[dict[str, Any]]
    left_out: int = 0


class Trainings:
    """Requests for training runs."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def newest(self, limit: int = 100) -> list[TrainingView]:
        """Return the training runs of all cycles, newest first."""
        return await self._daemon.list("/trainings", TrainingView, limit=limit)

    async def iterations(self, run: str, after: int = -1) -> list[IterationView]:
        """Return the iterations of a run with a number above ``after``, up to the newest."""
        found: list[IterationView] = []
        while True:
            path = f"/trainings/{part(run)}/iterations"
            page = await self._daemon.list(path, IterationView, after=after, limit=PAGE)
            found += page
            if len(page) < PAGE:
                return found
            after = page[-1].iteration

    async def samples(self, run: str) -> list[SampleView]:
        """Return the best, the median and the worst rollout of one group of the run's newest iteration."""
        return await self._daemon.list(f"/trainings/{part(run)}/samples", SampleView)

    async def stop(self, run: str, reason: str = "") -> Done:
        """Stop a run at its next safe point; its cycle continues without the capability."""
        return await self._daemon.post(f"/trainings/{part(run)}/stop", Reason(reason=reason), patient=True)
