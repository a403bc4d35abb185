"""What happens: as a stream that can be resumed, and page by page backwards.

Invariants: the stream is resumed by ``Last-Event-ID`` and sends a comment every ``KEEPALIVE_S`` so that a dead
listener is noticed. Devices and router are sampled for those who ask for what is present, and for nobody else; what
holds only at this moment has the number of the last event before it, so that resuming misses
nothing.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from traced.client.models import EventView
from traced.service.control import Control
from traced.service.looks.paging import Limit

KEEPALIVE_S = 15.0
POLL_S = 0.5
PAGE = 500  # events per read
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}  # no line ends there, but clients split at them
Seq = Annotated[int, Query(ge=0, le=2**63 - 1)]


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter()

    @router.get("/events", response_class=StreamingResponse)
    async def follow(
        request: Request,
        after: Seq = 0,
        present: bool = False,
        last_event_id: Annotated[int | None, Header(ge=0, le=2**63 - 1)] = None,
    ) -> StreamingResponse:
        """Events as server-sent events: those since ``Last-Event-ID``, after "missed" when some are kept no more.

        With ``present`` also what holds at this moment and is kept nowhere, without an id.
        """
        stream = _stream(control, request, after if last_event_id is None else last_event_id, present=present)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @router.get("/events/last")
    def last(limit: Limit = 100, before: Seq | None = None, kind: str = "", text: str = "") -> list[EventView]:
        """The newest events, newest first."""
        return control.last_events(limit, before, kind, text)

    return router


async def _stream(control: Control, request: Request, after: int, *, present: bool) -> AsyncIterator[str]:
    with control.watch.wanted() if present else nullcontext():
        async for told in _told(control, request, after, present=present):
            yield told


async def _told(control: Control, request: Request, after: int, *, present: bool) -> AsyncIterator[str]:
    quiet, told = 0.0, 0
    if (gone := await run_in_threadpool(control.missed, after)) is not None:
        yield _as_sse(gone)
        after = gone.seq
    while not await request.is_disconnected() and control.state != "draining":
        page = await run_in_threadpool(control.events, after, PAGE)
        for event in page:
            after = event.seq
            yield _as_sse(event)
        if present:
            told, holds = control.present.since(told)
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
