"""An asynchronous client of the control API, over the Unix socket of a data directory or over TCP with a token.

Invariants: one connection pool per client, closed at the end of ``async with``; ``events`` goes on after a broken
connection where it was, so that no event is missed or seen twice.
How it fails: ``NoDaemon`` where nothing answers, ``Refused`` with the daemon's own words. Not covered: starting one.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from traced.client.errors import NoDaemon, Refused
from traced.client.models import (
    AdapterView,
    Approval,
    AuditView,
    CycleView,
    Devices,
    Done,
    EventView,
    ParkedView,
    Policy,
    Problem,
    Readiness,
    Reason,
    Status,
)

RECONNECT_S = 1.0

Answer = TypeVar("Answer", bound=BaseModel)


class Client:
    """Speaks to one daemon. ``socket`` or ``url`` (with ``token``) says where it is."""

    def __init__(
        self, socket: Path | None = None, *, url: str = "http://traced", token: str = "", timeout_s: float = 30.0
    ) -> None:
        self._where = str(socket) if socket else url
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=timeout_s,
            transport=httpx.AsyncHTTPTransport(uds=str(socket)) if socket else None,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def status(self) -> Status:
        """The service at a glance."""
        return await self._get("/status", Status)

    async def ready(self) -> Readiness:
        """Whether the service can work, and what cannot."""
        response = await self._ask("GET", "/ready", accept=(200, 503))
        return Readiness.model_validate(response.json())

    async def cycles(self, limit: int = 50) -> list[CycleView]:
        """Cycles with their stages, newest first."""
        return [CycleView.model_validate(one) for one in await self._list("/cycles", limit=limit)]

    async def adapters(self) -> list[AdapterView]:
        """All adapter versions, oldest first."""
        return [AdapterView.model_validate(one) for one in await self._list("/adapters")]

    async def devices(self) -> Devices:
        """What each device does now, whether training could begin on it, who holds it."""
        return await self._get("/devices", Devices)

    async def parked(self) -> list[ParkedView]:
        """Inputs that failed too often, newest first, with the evidence."""
        return [ParkedView.model_validate(one) for one in await self._list("/parked")]

    async def audit(self, limit: int = 100) -> list[AuditView]:
        """What was decided, newest first."""
        return [AuditView.model_validate(one) for one in await self._list("/audit", limit=limit)]

    async def start_cycle(self, reason: str = "") -> Done:
        """Begin a cycle now, or carry on the unfinished one."""
        return await self._post("/cycles", Reason(reason=reason))

    async def pause(self, reason: str = "") -> Done:
        """Stop at the next safe point, and begin no cycle until ``resume``."""
        return await self._post("/pause", Reason(reason=reason), patient=True)

    async def resume(self, reason: str = "") -> Done:
        """Go on after a pause."""
        return await self._post("/resume", Reason(reason=reason))

    async def cancel(self, cycle_id: str, reason: str = "") -> Done:
        """End an unfinished cycle for good."""
        return await self._post(f"/cycles/{_part(cycle_id)}/cancel", Reason(reason=reason), patient=True)

    async def approve(self, adapter: str, reason: str = "", who: str = "", policy: Policy | None = None) -> Done:
        """Approve an adapter that passed its gate and put it live; ``who`` decides, if not the one who asks."""
        asked = Approval(reason=reason, who=who, policy=policy)
        return await self._post(f"/adapters/{_part(adapter)}/approve", asked)

    async def reject(self, adapter: str, reason: str = "", who: str = "") -> Done:
        """Decide against an adapter."""
        return await self._post(f"/adapters/{_part(adapter)}/reject", Reason(reason=reason, who=who))

    async def roll_back(self, adapter: str | None = None, reason: str = "", who: str = "") -> Done:
        """Undo the last promotion, or that of one adapter."""
        path = f"/adapters/{_part(adapter)}/rollback" if adapter else "/rollback"
        return await self._post(path, Reason(reason=reason, who=who))

    async def reload(self, reason: str = "", who: str = "") -> Done:
        """Have the service read its settings again."""
        return await self._post("/reload", Reason(reason=reason, who=who))

    async def release(self, parked_id: str, reason: str = "", who: str = "") -> Done:
        """Let a parked input be tried again."""
        return await self._post(f"/parked/{_part(parked_id)}/release", Reason(reason=reason, who=who))

    async def events(self, after: int = 0) -> AsyncIterator[EventView]:
        """Events with a number above ``after``, those to come included, for ever; connects again when cut off."""
        while True:
            try:
                async for event in self._stream(after):
                    after = event.seq
                    yield event
            except (httpx.TransportError, Refused) as error:
                if isinstance(error, Refused) and error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
                await self.status()  # raises NoDaemon when it is gone for good
            await asyncio.sleep(RECONNECT_S)

    async def _stream(self, after: int) -> AsyncIterator[EventView]:
        timeout = httpx.Timeout(30.0, read=60.0)  # the daemon sends a comment every 15 s
        async with self._http.stream(
            "GET", "/events", headers={"Last-Event-ID": str(after)}, timeout=timeout
        ) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(response)
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield EventView.model_validate(json.loads(line.removeprefix("data:")))

    async def _get(self, path: str, kind: type[Answer]) -> Answer:
        return kind.model_validate((await self._ask("GET", path)).json())

    async def _list(self, path: str, **query: Any) -> list[Any]:
        found: list[Any] = (await self._ask("GET", path, query=query)).json()
        return found

    async def _post(self, path: str, body: BaseModel, *, patient: bool = False) -> Done:
        """``patient``: the answer comes at the next safe point, an iteration of training away at most."""
        answer = await self._ask("POST", path, body=body.model_dump(), patient=patient)
        return Done.model_validate(answer.json())

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        accept: tuple[int, ...] = (200,),
        patient: bool = False,
    ) -> httpx.Response:
        timeout = httpx.Timeout(self._http.timeout.connect, read=None) if patient else self._http.timeout
        try:
            response = await self._http.request(method, path, params=query, json=body, timeout=timeout)
        except httpx.TransportError as error:
            raise NoDaemon(f"no daemon answers at {self._where} ({error})", hint="traced up") from error
        if response.status_code not in accept:
            raise _refusal(response)
        return response


def _part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="@")


def _refusal(response: httpx.Response) -> Refused:
    try:
        problem = Problem.model_validate(response.json())
    except ValueError:
        problem = Problem(type="Unknown", message=response.text[:500] or response.reason_phrase)
    return Refused(problem.message, hint=problem.hint, status=response.status_code)
