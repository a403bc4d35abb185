"""What the first screen shows beside the status: the router's health, and success over time.

Invariants: what is read is bounded: ``CYCLES`` cycles' final figures, and the ``MOST`` newest exchanges of ``DAYS``
days, however many there are.
"""

from collections import Counter
from datetime import timedelta

from fastapi import APIRouter

from store.database import reading
from store.records import Cycle
from store.repositories.cycles import list_cycles
from store.repositories.production import judged_since
from traced.client.overview import CycleRate, DayRate, Health, Rates
from traced.service.control import Control

CYCLES, DAYS, MOST = 60, 30, 10_000


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter(prefix="/overview")

    @router.get("/health")
    def health() -> Health:
        """The router, its engines and its traffic now."""
        return control.health()

    @router.get("/rates")
    def rates() -> Rates:
        """Success over time: of the target's cycles that were evaluated, and of production by the day."""
        return rates_of(control)

    return router


def rates_of(control: Control) -> Rates:
    """Success over time."""
    with reading(control.store) as opened:
        cycles = list_cycles(opened, target=control.target, limit=CYCLES)
        since = control.now() - timedelta(days=DAYS)
        judged, partial = judged_since(opened, control.target, since, most=MOST)
    told, well = Counter(at.date() for at, _ in judged), Counter(at.date() for at, success in judged if success)
    return Rates(
        cycles=[rate for cycle in reversed(cycles) if (rate := _rate(cycle)) is not None],
        days=[DayRate(day=day, judged=told[day], successes=well[day]) for day in sorted(told)],
        partial=partial,
    )


def _rate(cycle: Cycle) -> CycleRate | None:
    """None for a cycle that has measured nothing on the test tasks (yet)."""
    base, routed = (cycle.summary.get(name) for name in ("base", "routed"))
    if base is None and routed is None:
        return None
    at, tasks = cycle.finished_at or cycle.created_at, cycle.summary.get("test_seeds") or 0
    return CycleRate(cycle_id=cycle.id, at=at, base=base, routed=routed, tasks=tasks)
