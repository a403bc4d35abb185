"""An asynchronous client of the control API, over the Unix socket of a data directory or over TCP with a token.

Invariants: one connection pool per client, closed at the end of ``async with``; ``events`` goes on after a broken
connection where it was, so that no event is missed or seen twice.
How it fails: ``NoDaemon`` where nothing answers, ``Refused`` with the daemon's own words. Not covered: starting one.
"""

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus
from pathlib import Path

import httpx

from traced.client.approvals import Approvals, Prompts
from traced.client.capabilities import Capabilities
from traced.client.environments import Environments
from traced.client.models import (
    AdapterView,
    Approval,
    AuditView,
    CycleView,
    Devices,
    Done,
    EventView,
    Policy,
    QuarantinedInputView,
    Readiness,
    Reason,
    Status,
)
from traced.client.serving import OverviewCalls, Serving
from traced.client.trainings import Trainings
from traced.client.trajectories import Trajectories
from traced.client.transport import RequestRefused, Transport, part

RECONNECT_S = 1.0


class Client:
    """Speaks to one daemon. ``socket`` or ``url`` (with ``token``) says where it is."""

    def __init__(
        self, socket: Path | None = None, *, url: str = "http://traced", token: str = "", timeout_s: float = 30.0
    ) -> None:
        self._daemon = Transport(socket, url, token, timeout_s)
        self.overview = OverviewCalls(self._daemon)
        self.environments = Environments(self._daemon)
        self.trainings = Trainings(self._daemon)
        self.capabilities = Capabilities(self._daemon)
        self.trajectories = Trajectories(self._daemon)
        self.serving = Serving(self._daemon)
        self.approvals = Approvals(self._daemon)
        self.prompts = Prompts(self._daemon)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._daemon.close()

    async def status(self) -> Status:
        """The service at a glance."""
        return await self._daemon.get("/status", Status)

    async def ready(self) -> Readiness:
        """Whether the service can work, and what cannot."""
        response = await self._daemon.ask("GET", "/ready", accept=(200, 503))
        return Readiness.model_validate(response.json())

    async def cycles(self, limit: int = 50) -> list[CycleView]:
        """Cycles with their stages, newest first."""
        return await self._daemon.list("/cycles", CycleView, limit=limit)

    async def cycle(self, cycle_id: str) -> CycleView:
        """One cycle with its stages, however old."""
        return await self._daemon.get(f"/cycles/{part(cycle_id)}", CycleView)

    async def adapters(self) -> list[AdapterView]:
        """All adapter versions, oldest first."""
        return await self._daemon.list("/adapters", AdapterView)

    async def devices(self) -> Devices:
        """What each device does now, whether training could begin on it, who holds it."""
        return await self._daemon.get("/devices", Devices)

    async def parked(self) -> list[QuarantinedInputView]:
        """Inputs that failed too often, newest first, with the evidence."""
        return await self._daemon.list("/parked", QuarantinedInputView)

    async def audit(self, limit: int = 100) -> list[AuditView]:
        """What was decided, newest first."""
        return await self._daemon.list("/audit", AuditView, limit=limit)

    async def start_cycle(self, reason: str = "") -> Done:
        """Begin a cycle now, or carry on the unfinished one."""
        return await self._daemon.post("/cycles", Reason(reason=reason))

    async def pause(self, reason: str = "") -> Done:
        """Stop at the next safe point, and begin no cycle until ``resume``."""
        return await self._daemon.post("/pause", Reason(reason=reason), patient=True)

    async def resume(self, reason: str = "") -> Done:
        """Go on after a pause."""
        return await self._daemon.post("/resume", Reason(reason=reason))

    async def cancel(self, cycle_id: str, reason: str = "") -> Done:
        """End an unfinished cycle for good."""
        return await self._daemon.post(f"/cycles/{part(cycle_id)}/cancel", Reason(reason=reason), patient=True)

    async def approve(self, adapter: str, reason: str = "", actor: str = "", policy: Policy | None = None) -> Done:
        """Approve an adapter that passed its gate and put it live; ``who`` decides, if not the one who asks."""
        query = Approval(reason=reason, who=actor, policy=policy)
        return await self._daemon.post(f"/adapters/{part(adapter)}/approve", query)

    async def reject(self, adapter: str, reason: str = "", actor: str = "") -> Done:
        """Decide against an adapter."""
        return await self._daemon.post(f"/adapters/{part(adapter)}/reject", Reason(reason=reason, who=actor))

    async def roll_back(self, adapter: str | None = None, reason: str = "", actor: str = "") -> Done:
        """Undo the last promotion, or that of one adapter."""
        path = f"/adapters/{part(adapter)}/rollback" if adapter else "/rollback"
        return await self._daemon.post(path, Reason(reason=reason, who=actor))

    async def reload(self, reason: str = "", actor: str = "") -> Done:
        """Have the service read its settings again."""
        return await self._daemon.post("/reload", Reason(reason=reason, who=actor))

    async def release(self, parked_id: str, reason: str = "", actor: str = "") -> Done:
        """Release a quarantined input: the service retries it."""
        return await self._daemon.post(f"/parked/{part(parked_id)}/release", Reason(reason=reason, who=actor))

    async def last_events(
        self, limit: int = 100, before: int | None = None, kind: str = "", text: str = ""
    ) -> list[EventView]:
        """The newest events before a number, newest first: of kinds that begin with ``kind``, that hold ``text``."""
        return await self._daemon.list("/events/last", EventView, limit=limit, before=before, kind=kind, text=text)

    async def listen(self, after: int = 0, *, present: bool = False) -> AsyncGenerator[EventView, None]:
        """As ``events``, until the connection breaks (httpx.TransportError) or the daemon ends it.

        With ``present`` also what holds at this moment and is kept nowhere; it has the number of the event before it.
        """
        async for last_seq in self._daemon.stream("/events", after, present=present):
            yield EventView.model_validate(last_seq)

    async def events(self, after: int = 0) -> AsyncGenerator[EventView, None]:
        """Events with a number above ``after``, those to come included, for ever; connects again when cut off."""
        while True:
            try:
                async for event in self.listen(after):
                    after = event.seq
                    yield event
            except (httpx.TransportError, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                await self.status()  # raises NoDaemon when it is gone for good
            await asyncio.sleep(RECONNECT_S)
