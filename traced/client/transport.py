"""HTTP requests to one daemon, over the Unix socket of a data directory or over TCP with a token.

Invariants: one connection pool; proxies of the environment are not used; a GET request, and an action, which has an
idempotency key, is repeated once if the daemon has closed the pooled connection.

Errors:

ClientError (a TracedError)
├── NoDaemon        nothing answers at the socket or address
└── RequestRefused  the daemon answered with an error: ``status``, and the daemon's message and hint
"""

import json
import uuid
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
    """A request to the daemon failed."""


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
    """Connection pool to one daemon, at the Unix socket ``socket`` or at ``url`` (with ``token``)."""

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
        """Close the connection pool."""
        await self._http.aclose()

    async def get(self, path: str, kind: type[Answer], /, **query: Any) -> Answer:
        """Return one object of type ``kind``; query parameters that are None are left out."""
        return kind.model_validate((await self.ask("GET", path, query=_query(query))).json())

    async def list(self, path: str, kind: type[Answer], /, **query: Any) -> list[Answer]:
        """Return a list of objects of type ``kind``; query parameters that are None are left out."""
        return [
            kind.model_validate(item_type) for item_type in (await self.ask("GET", path, query=_query(query))).json()
        ]

    async def post(self, path: str, body: BaseModel, *, patient: bool = False, key: str = "") -> Done:
        """Send an action; ``patient`` waits without a limit, for a safe point of a training or an upload.

        It is carried out once, also if the connection breaks and it is repeated; ``key`` is its idempotency key.
        """
        answer = await self.ask("POST", path, body=body.model_dump(), patient=patient, key=key or uuid.uuid4().hex)
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
        key: str = "",
    ) -> httpx.Response:
        """Return the response; a request with an idempotency ``key`` is repeated once.

        Raises ``NoDaemon``, or ``RequestRefused`` for a status that is not in ``accept``.
        """
        timeout = httpx.Timeout(self._http.timeout.connect, read=None) if patient else self._http.timeout
        headers = {"Idempotency-Key": key} if key else {}
        asked = partial(self._http.request, method, path, params=query, json=body, timeout=timeout, headers=headers)
        try:
            try:
                response = await asked()
            except httpx.RemoteProtocolError:  # the daemon closed the idle connection when it was used again
                if method != "GET" and not key:
                    raise
                response = await asked()
        except httpx.TransportError as error:
            raise NoDaemon(
                f"no daemon answers at {self.address} ({str(error) or type(error).__name__})", hint="traced up"
            ) from error
        if response.status_code not in accept:
            raise _refusal(response)
        return response

    async def stream(self, path: str, after: int, **query: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of server-sent events behind ``after``; raises httpx.TransportError or ``RequestRefused``."""
        headers, timeout = {"Last-Event-ID": str(after)}, STREAM_TIMEOUT
        async with self._http.stream("GET", path, headers=headers, params=_query(query), timeout=timeout) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(response)
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line.removeprefix("data:"))


def part(name: str) -> str:
    """Return a name escaped as one segment of a URL path."""
    return quote(name, safe="@")


def _query(query: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in query.items() if value is not None}


def _refusal(response: httpx.Response) -> RequestRefused:
    try:
        problem = Problem.model_validate(response.json())
    except ValueError:
        problem = Problem(type="Unknown", message=response.text[:500] or response.reason_phrase)
    return RequestRefused(problem.message, hint=problem.hint, status=response.status_code)
