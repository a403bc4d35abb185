"""HTTP to one daemon, over the Unix socket of a data directory or over TCP with a token.

Invariants: one connection pool; the environment's proxies are not asked; what only looks is asked once more where a
kept connection turns out to be closed. How it fails: ``NoDaemon`` where nothing
answers, ``Refused`` with the daemon's own words.

What can go wrong between a client and the daemon.

ClientError (a TracedError)
├── NoDaemon   nothing answers at the socket or address
└── Refused    the daemon answered with an error; ``status`` and the daemon's own message and hint
"""

import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from traced.client.models import Done, Problem
from traced.core.errors import TracedError


class ClientError(TracedError):
    """The daemon could not be asked."""


class NoDaemon(ClientError):
    """Nothing answers at the socket or address."""


class RequestRefused(ClientError):
    """The daemon answered with an error."""

    def __init__(self, message: str, *, hint: str = "", status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status


Answer = TypeVar("Answer", bound=BaseModel)
STREAM_TIMEOUT = httpx.Timeout(30.0, read=60.0)  # the daemon sends a comment every 15 s


class Transport:
    """Asks one daemon. ``socket`` or ``url`` (with ``token``) says where it is."""

    def __init__(self, socket: Path | None, url: str, token: str, timeout_s: float) -> None:
        self.address = str(socket) if socket else url
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=timeout_s,
            transport=httpx.AsyncHTTPTransport(uds=str(socket)) if socket else None,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
        )

    async def close(self) -> None:
        """Close the pool."""
        await self._http.aclose()

    async def get(self, path: str, kind: type[Answer], /, **query: Any) -> Answer:
        """One object; what is None is not asked for."""
        return kind.model_validate((await self.ask("GET", path, query=_query(query))).json())

    async def list(self, path: str, kind: type[Answer], /, **query: Any) -> list[Answer]:
        """A list of objects."""
        return [
            kind.model_validate(item_type) for item_type in (await self.ask("GET", path, query=_query(query))).json()
        ]

    async def post(self, path: str, body: BaseModel, *, patient: bool = False) -> Done:
        """``patient``: the answer comes at the next safe point, an iteration of training away at most."""
        answer = await self.ask("POST", path, body=body.model_dump(), patient=patient)
        return Done.model_validate_json(answer.content)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        accept: tuple[int, ...] = (200,),
        patient: bool = False,
    ) -> httpx.Response:
        """The response to a request; raises unless its status is one of ``accept``."""
        timeout = httpx.Timeout(self._http.timeout.connect, read=None) if patient else self._http.timeout
        asked = partial(self._http.request, method, path, params=query, json=body, timeout=timeout)
        try:
            try:
                response = await asked()
            except httpx.RemoteProtocolError:  # the daemon let go of an idle connection as it was used again
                if method != "GET":
                    raise
                response = await asked()
        except httpx.TransportError as error:
            raise NoDaemon(f"no daemon answers at {self.address} ({error})", hint="traced up") from error
        if response.status_code not in accept:
            raise _refusal(response)
        return response

    async def stream(self, path: str, after: int, **query: Any) -> AsyncIterator[dict[str, Any]]:
        """The data of server-sent events behind ``after``, until the connection ends (raises httpx.TransportError)."""
        headers, timeout = {"Last-Event-ID": str(after)}, STREAM_TIMEOUT
        async with self._http.stream("GET", path, headers=headers, params=_query(query), timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(response)
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))


def part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="@")


def _query(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _refusal(response: httpx.Response) -> RequestRefused:
    try:
        problem = Problem.model_validate(response.json())
    except ValueError:
        problem = Problem(type="Unknown", message=response.text[:500] or response.reason_phrase)
    return RequestRefused(problem.message, hint=problem.hint, status=response.status_code)
