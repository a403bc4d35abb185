"""The service at a glance: its state, cycles, adapters, devices, parked inputs, and what was decided."""

from typing import Annotated

from fastapi import APIRouter, Depends

from traced.client.models import AdapterView, AuditView, CycleView, Devices, ParkedView, Status
from traced.service.control import Control
from traced.service.doors import Caller, Door
from traced.service.looks.paging import Limit


def router(control: Control, door: Door) -> APIRouter:
    """Its paths; ``door`` says who asks."""
    router = APIRouter()

    @router.get("/status")
    def status(caller: Annotated[Caller, Depends(door)]) -> Status:
        """The service at a glance, and what the one who asks may do."""
        return control.status(caller.role)

    @router.get("/cycles")
    def cycles(limit: Limit = 50) -> list[CycleView]:
        """The newest cycles with their stages."""
        return control.cycles(limit)

    @router.get("/cycles/{cycle_id:path}")
    def cycle(cycle_id: str) -> CycleView:
        """One cycle with its stages, however old."""
        return control.cycle(cycle_id)

    @router.get("/adapters")
    def adapters() -> list[AdapterView]:
        """All adapter versions, oldest first."""
        return control.adapters()

    @router.get("/devices")
    def devices() -> Devices:
        """What each device does now, whether training could begin on it, who holds it."""
        return control.devices()

    @router.get("/parked")
    def parked() -> list[ParkedView]:
        """Inputs that failed too often, newest first, with the evidence."""
        return control.parked()

    @router.get("/audit")
    def audit(limit: Limit = 100) -> list[AuditView]:
        """What was decided, newest first."""
        return control.audit(limit)

    return router
