"""What the first screen shows beside the status: health of the router and its engines, success rates over time."""

from datetime import date, datetime
from typing import Literal

from pydantic import Field

from traced.client.models import Model
from traced.client.transport import Transport


class RouterHealth(Model):
    """The router's own answer; ``engines`` is {URL: "ok", or what is wrong with it}."""

    state: Literal["ready", "not ready", "away", "unknown"] = Field(
        description='"away": nobody answers; "unknown": its port is not fixed, so it is not asked'
    )
    address: str
    expected: bool = Field(description="whether the service runs a router itself, so that being away is a trouble")
    engines: dict[str, str] = Field(default={})
    trouble: str = ""


class Traffic(Model):
    """What the store knows of the router: conversations by model, requests of a day that failed by their status.

    ``unsettled`` exchanges are no trajectories yet; ``by_default`` are the day's conversations that were left to the
    base model, by reason; ``outcomes`` count all conversations of production. ``partial``: there may have been more.
    """

    hour: dict[str, int]
    day: dict[str, int]
    failures: dict[int, int]
    by_default: dict[str, int]
    unsettled: int
    outcomes: dict[str, int]
    partial: bool


class Health(Model):
    """The router and its traffic at this moment."""

    router: RouterHealth
    traffic: Traffic


class CycleRate(Model):
    """Success on the target's test tasks, as one cycle measured it: of the base model, and with the router."""

    cycle_id: str
    at: datetime
    base: float | None
    routed: float | None
    tasks: int = Field(description="that both were measured on; 0 where nothing was routed")


class DayRate(Model):
    """Production's judged conversations that ended on one day (UTC), and the successes among them."""

    day: date
    judged: int
    successes: int


class Rates(Model):
    """Success over time, oldest first; ``partial``: of production only the newest conversations were counted."""

    cycles: list[CycleRate]
    days: list[DayRate]
    partial: bool


class OverviewCalls:
    """What is asked for the first screen."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def health(self) -> Health:
        """The router, its engines and its traffic now."""
        return await self._daemon.get("/overview/health", Health)

    async def rates(self) -> Rates:
        """Success over time, of the target's cycles and of production."""
        return await self._daemon.get("/overview/rates", Rates)
