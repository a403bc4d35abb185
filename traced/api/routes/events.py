"""What happens: as a stream that can be resumed, and page by page backwards.

Invariants: the stream is resumed by ``Last-Event-ID`` and sends a comment every ``KEEPALIVE_S`` so that a dead
listener is noticed; it ends as soon as its listener is no longer let in (a token that was taken back), however much
happens. Devices and router are sampled for those who ask for what is present, and for nobody else; what holds only at
this moment has the number of the last event before it, so that resuming misses nothing.
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
NEWEST = 2**31 - 1  # the highest number that PostgreSQL gives an event
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # no line ends there, but clients split at them
Listens = Callable[[], Awaitable[bool]]  # whether somebody who may hear it is still there
Seq = Annotated[int, Query(ge=0, le=NEWEST)]


def stream(control: Control, door: Door) -> APIRouter:
    """The path of the stream, whose readings have turns of their own; ``door`` is asked again and again."""
    router = APIRouter()
    Who = Annotated[Caller, Depends(door)]

    @router.get("/events", response_class=StreamingResponse)
    async def follow(
        request: Request,
        caller: Who,
        after: Seq = 0,
        present: bool = False,
        last_event_id: Annotated[int | None, Header(ge=0, le=NEWEST)] = None,
    ) -> StreamingResponse:
        """Events as server-sent events: those since ``Last-Event-ID``, after "missed" when some are kept no more.

        With ``present`` also what holds at this moment and is kept nowhere, without an id.
        """

        async def listens() -> bool:
            here = caller.still_let_in() and control.state != "draining"
            return here and not await request.is_disconnected()

        heard = _heard(control, listens, after if last_event_id is None else last_event_id, present=present)
        return StreamingResponse(heard, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return router


def router(control: Control) -> APIRouter:
    """The path of the pages."""
    router = APIRouter()

    @router.get("/events/last")
    def last(limit: Limit = 100, before: Seq | None = None, kind: str = "", text: str = "") -> list[EventView]:
        """The newest events, newest first."""
        return control.last_events(limit, before, kind, text)

    return router


async def _heard(control: Control, listens: Listens, after: int, *, present: bool) -> AsyncIterator[str]:
    with control.watch.wanted() if present else nullcontext():
        async for told in _told(control, listens, after, present=present):
            yield told


async def _told(control: Control, listens: Listens, after: int, *, present: bool) -> AsyncIterator[str]:
    quiet, told = 0.0, 0
    async with control.streams.one(patient=True):
        gone = await run_in_threadpool(control.missed, after)
    if gone is not None:
        yield _as_sse(gone)
        after = gone.seq
    while True:
        async with control.streams.one(patient=True):
            page = await run_in_threadpool(control.events, after, PAGE)
        told, holds = control.present.since(told) if present else (told, [])
        if not await listens():  # asked after what was read, so that nothing is told that happened later
            return
        for event in page:
            after = event.seq
            yield _as_sse(event)
        for event in holds:
            yield _as_sse(event.model_copy(update={"seq": after}))
        if page:
            quiet = 0.0
            continue
        if quiet >= KEEPALIVE_S:
            quiet = 0.0
            yield ": still here\n\n"
        await asyncio.sleep(POLL_S)
        quiet += POLL_S


def _as_sse(event: EventView) -> str:
    """One event in the form of the WHATWG's server-sent events."""
    data = event.model_dump_json().translate(LINE_ENDS)
    return f"id: {event.seq}\nevent: {event.kind}\ndata: {data}\n\n"
