"""An asynchronous client of the control API, over the Unix socket of a data directory or over TCP with a token.

Invariants: one connection pool per client, closed at the end of ``async with``; after a broken connection ``events``
continues behind the last event, so that no event is missed or returned twice.
How it fails: ``NoDaemon`` if nothing answers, ``RequestRefused`` with the daemon's message. Not covered: starting a
daemon.
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
    DecisionRequest,
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
    """Client of one daemon, at the Unix socket ``socket`` or at ``url`` (with ``token``)."""

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
        """Return a summary of the service."""
        return await self._daemon.get("/status", Status)

    async def ready(self) -> Readiness:
        """Return whether the service is ready, and the parts that are not."""
        response = await self._daemon.ask("GET", "/ready", accept=(200, 503))
        return Readiness.model_validate(response.json())

    async def cycles(self, limit: int = 50) -> list[CycleView]:
        """Return cycles with their stages, newest first."""
        return await self._daemon.list("/cycles", CycleView, limit=limit)

    async def cycle(self, cycle_id: str) -> CycleView:
        """Return a cycle of any age with its stages."""
        return await self._daemon.get(f"/cycles/{part(cycle_id)}", CycleView)

    async def adapters(self) -> list[AdapterView]:
        """Return all adapter versions, oldest first."""
        return await self._daemon.list("/adapters", AdapterView)

    async def devices(self) -> Devices:
        """Return all devices: current load, whether a training could start, and the lease."""
        return await self._daemon.get("/devices", Devices)

    async def quarantined(self) -> list[QuarantinedInputView]:
        """Return the quarantined inputs with the evidence, newest first."""
        return await self._daemon.list("/quarantined", QuarantinedInputView)

    async def audit(self, limit: int = 100) -> list[AuditView]:
        """Return the audit log, newest first."""
        return await self._daemon.list("/audit", AuditView, limit=limit)

    async def start_cycle(self, reason: str = "") -> Done:
        """Request a cycle; it starts at once or, if a cycle is unfinished, when that one has ended."""
        return await self._daemon.post("/cycles", Reason(reason=reason))

    async def pause(self, reason: str = "") -> Done:
        """Pause the running cycle at its next safe point; no cycle starts until ``resume``."""
        return await self._daemon.post("/pause", Reason(reason=reason), patient=True)

    async def resume(self, reason: str = "") -> Done:
        """Resume a paused cycle and allow new cycles."""
        return await self._daemon.post("/resume", Reason(reason=reason))

    async def cancel(self, cycle_id: str, reason: str = "") -> Done:
        """Cancel an unfinished cycle; it cannot be resumed."""
        return await self._daemon.post(f"/cycles/{part(cycle_id)}/cancel", Reason(reason=reason), patient=True)

    async def approve(
        self, adapter: str, reason: str = "", actor: str = "", policy: Policy | None = None, *, tag: str = ""
    ) -> Done:
        """Approve an adapter that passed its gate; it then takes traffic.

        Args:
            adapter: name of the version.
            reason: reason of the decision.
            actor: person on whose behalf the caller decides, if that is another one.
            policy: how it takes traffic, by default as the service's settings say.
            tag: tag of the state on which the decision is based; it is refused if the state has changed since.
        """
        query = Approval(reason=reason, who=actor, policy=policy, tag=tag)
        return await self._daemon.post(f"/adapters/{part(adapter)}/approve", query, patient=True)

    async def reject(self, adapter: str, reason: str = "", actor: str = "", *, tag: str = "") -> Done:
        """Reject an adapter; it takes no traffic. The arguments are those of ``approve``."""
        query = DecisionRequest(reason=reason, who=actor, tag=tag)
        return await self._daemon.post(f"/adapters/{part(adapter)}/reject", query)

    async def roll_back(
        self, adapter: str | None = None, reason: str = "", actor: str = "", *, tag: str = "", key: str = ""
    ) -> Done:
        """Roll back the promotion of the named adapter, or the last promotion unless it is rolled back already.

        A repetition with the same idempotency ``key`` changes nothing.
        """
        path = f"/adapters/{part(adapter)}/rollback" if adapter else "/rollback"
        query = DecisionRequest(reason=reason, who=actor, tag=tag if adapter else "")
        return await self._daemon.post(path, query, key=key)

    async def reload(self, reason: str = "", actor: str = "") -> Done:
        """Make the service reload its settings."""
        return await self._daemon.post("/reload", Reason(reason=reason, who=actor))

    async def release(self, input_id: str, reason: str = "", actor: str = "") -> Done:
        """Release a quarantined input: the service retries it."""
        return await self._daemon.post(f"/quarantined/{part(input_id)}/release", Reason(reason=reason, who=actor))

    async def last_events(
        self, limit: int = 100, before: int | None = None, kind: str = "", text: str = ""
    ) -> list[EventView]:
        """Return the newest events before a number, newest first, filtered by a prefix of the kind and by a text."""
        return await self._daemon.list("/events/last", EventView, limit=limit, before=before, kind=kind, text=text)

    async def listen(self, after: int = 0, *, present: bool = False) -> AsyncGenerator[EventView, None]:
        """Yield the events with a number above ``after`` until the daemon closes the connection.

        With ``present`` also yield the live state, which is not stored; it has the number of the last stored event.
        Raises httpx.TransportError if the connection breaks.
        """
        async for last_seq in self._daemon.stream("/events", after, present=present):
            yield EventView.model_validate(last_seq)

    async def events(self, after: int = 0) -> AsyncGenerator[EventView, None]:
        """Yield the events with a number above ``after`` for ever, future ones included; reconnect if disconnected."""
        while True:
            try:
                async for event in self.listen(after):
                    after = event.seq
                    yield event
            except (httpx.TransportError, RequestRefused) as error:
                if isinstance(error, RequestRefused) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                await self.status()  # raises ``NoDaemon`` if the daemon has ended
            await asyncio.sleep(RECONNECT_S)
