"""Routes for events: a resumable stream, and pages backwards from the newest.

Invariants: the stream is resumed by ``Last-Event-ID``, sends a comment every ``KEEPALIVE_S`` without events, and ends
when its listener's credentials are revoked. Live state is sampled only while a listener requests it; it has the number
of the last stored event, so that a listener that resumes misses no event.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from traced.api.auth import Caller, Door
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.models import EventView

KEEPALIVE_S = 15.0
POLL_S = 0.5
PAGE = 500  # events per read
MAX_SEQ = 2**31 - 1  # highest number of an event in PostgreSQL
# The format does not define these characters as line ends, but some clients split lines there.
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
Listens = Callable[[], Awaitable[bool]]  # whether the listener is still connected and authorized
Seq = Annotated[int, Query(ge=0, le=MAX_SEQ)]


def stream(control: Control, door: Door) -> APIRouter:
    """Build the route of the stream; ``door`` authenticates the listener."""
    router = APIRouter()
    AuthenticatedCaller = Annotated[Caller, Depends(door)]

    @router.get("/events", response_class=StreamingResponse)
    async def follow(
        request: Request,
        caller: AuthenticatedCaller,
        after: Seq = 0,
        present: bool = False,
        last_event_id: Annotated[int | None, Header(ge=0, le=MAX_SEQ)] = None,
    ) -> StreamingResponse:
        """Stream server-sent events from ``Last-Event-ID`` on; "missed" comes first if older ones were deleted.

        With ``present`` the stream includes the live state, which is not stored and has no event id.
        """

        async def listens() -> bool:
            is_authorized = await run_in_threadpool(caller.still_let_in) and control.state != "draining"
            return is_authorized and not await request.is_disconnected()

        lines = _stream_with_sampling(
            control, listens, after if last_event_id is None else last_event_id, present=present
        )
        return StreamingResponse(lines, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


def router(control: Control) -> APIRouter:
    """Build the route of the pages."""
    router = APIRouter()

    @router.get("/events/last")
    def last(limit: Limit = 100, before: Seq | None = None, kind: str = "", text: str = "") -> list[EventView]:
        """The newest events, newest first."""
        return control.last_events(limit, before, kind, text)

    return router


async def _stream_with_sampling(control: Control, listens: Listens, after: int, *, present: bool) -> AsyncIterator[str]:
    with control.watch.is_sampling() if present else nullcontext():
        async for line in _stream(control, listens, after, present=present):
            yield line


async def _stream(control: Control, listens: Listens, after: int, *, present: bool) -> AsyncIterator[str]:
    idle_s, live_position = 0.0, 0
    async with control.streams.slot(patient=True):
        gap = await run_in_threadpool(control.missed, after)
    if gap is not None:
        yield _as_sse(gap)
        after = gap.seq
    while True:
        async with control.streams.slot(patient=True):
            page = await run_in_threadpool(control.events, after, PAGE)
            live_position, live_events = control.present.since(live_position) if present else (live_position, [])
            # Checked after reading, so that a revoked listener gets nothing that happened later.
            if not await listens():
                return
        for event in page:
            after = event.seq
            yield _as_sse(event)
        for event in live_events:
            yield _as_sse(event.model_copy(update={"seq": after}))
        if page:
            idle_s = 0.0
            continue
        if idle_s >= KEEPALIVE_S:
            idle_s = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)
        idle_s += POLL_S


def _as_sse(event: EventView) -> str:
    """Format an event as a server-sent event (WHATWG HTML standard)."""
    data = event.model_dump_json().translate(LINE_ENDS)
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {data}\n\n"
