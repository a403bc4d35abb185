"""Routes for the overview: status, cycles, adapters, devices, audit, the router's health, and success rates over time.

The rates cover at most ``CYCLES`` cycles and the ``MAX_ROWS`` newest judged trajectories of ``DAYS`` days.
"""

from collections import Counter
from datetime import timedelta
from typing import Annotated

from fastapi import APIRouter, Depends

from store.database import read_session
from store.records import Cycle
from store.repositories.cycles import list_cycles
from store.repositories.trajectories import judged_since
from traced.api.auth import Caller, Door
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.models import AdapterView, AuditView, CycleView, Devices, QuarantinedInputView, Status
from traced.client.serving import CycleRate, DayRate, Health, Rates

CYCLES, DAYS, MAX_ROWS = 60, 30, 10_000


def router(control: Control) -> APIRouter:
    """Build the routes."""
    router = APIRouter(prefix="/overview")

    @router.get("/health")
    def health() -> Health:
        """The current state of the router, its engines and its traffic."""
        return control.health()

    @router.get("/rates")
    def rates() -> Rates:
        """Success rates over time: of evaluated cycles on the target, and of production per day."""
        return rates_of(control)

    return router


def rates_of(control: Control) -> Rates:
    """Return the success rates by cycle and, in production, by day (UTC)."""
    with read_session(control.store) as session:
        cycles = list_cycles(session, target=control.target, limit=CYCLES)
        start = control.now() - timedelta(days=DAYS)
        outcomes, partial = judged_since(session, control.target, start, limit=MAX_ROWS)
    totals, successes = (
        Counter(at.date() for at, _ in outcomes),
        Counter(at.date() for at, success in outcomes if success),
    )
    return Rates(
        cycles=[rate for cycle in reversed(cycles) if (rate := _rate(cycle)) is not None],
        days=[DayRate(day=day, judged=totals[day], successes=successes[day]) for day in sorted(totals)],
        partial=partial,
    )


def _rate(cycle: Cycle) -> CycleRate | None:
    """Return the success rates of a cycle, None if it was not evaluated."""
    # Cycles of earlier versions have the second rate under another name.
    base, routed = cycle.summary.get("base"), cycle.summary.get("composed", cycle.summary.get("routed"))
    if routed is None:
        # A cycle that promotes nothing leaves the live system as it was.
        routed = (cycle.summary.get("step") or {}).get("success")
    if base is None and routed is None:
        return None
    at, tasks = cycle.finished_at or cycle.created_at, cycle.summary.get("test_seeds") or 0
    return CycleRate(cycle_id=cycle.id, at=at, base=base, routed=routed, tasks=tasks)


def status_router(control: Control, door: Door) -> APIRouter:
    """Build the routes of the status; ``door`` authenticates the caller."""
    status_router = APIRouter()

    @status_router.get("/status")
    def status(caller: Annotated[Caller, Depends(door)]) -> Status:
        """A summary of the service, and the role of the caller."""
        return control.status(caller.role)

    @status_router.get("/cycles")
    def cycles(limit: Limit = 50) -> list[CycleView]:
        """The newest cycles with their stages."""
        return control.cycles(limit)

    @status_router.get("/cycles/{cycle_id:path}")
    def cycle(cycle_id: str) -> CycleView:
        """One cycle with its stages."""
        return control.cycle(cycle_id)

    @status_router.get("/adapters")
    def adapters() -> list[AdapterView]:
        """All adapter versions, oldest first."""
        return control.adapters()

    @status_router.get("/devices")
    def devices() -> Devices:
        """All devices: current load, whether a training could start, and the holder of the lease."""
        return control.devices()

    @status_router.get("/quarantined")
    def quarantined() -> list[QuarantinedInputView]:
        """Quarantined inputs with the evidence, newest first."""
        return control.quarantined()

    @status_router.get("/audit")
    def audit(limit: Limit = 100) -> list[AuditView]:
        """The audit log of decisions, newest first."""
        return control.audit(limit)

    return status_router
