"""The control API: FastAPI over ``Control``, the same on the Unix socket and on TCP.

Invariants: every answer that is an error has the form {"type", "message", "hint"}, whichever path was asked for; text
with a NUL is refused, since no database keeps any; ``/alive``, ``/ready``,
``/metrics`` and ``/openapi.json`` need no token, everything else does on TCP; the event stream is resumed by
``Last-Event-ID`` and sends a comment every ``KEEPALIVE_S`` so that a dead listener is noticed. What asks the store runs
on a thread of the API's own, what only looks also in its turn (``traced.api.queries``): a locked one, or a crowd of
listeners, holds up callers and not the cycle.
How it fails: a defect answers 500 with its type's name and is logged with its traceback; details stay in the log.
Not covered: who may connect (``traced.api.auth``).

What can be looked at: one module of paths per subject, over the store's repositories.

Invariants: nothing here writes; each answer is of one moment of the store. Who may look is the door's
(``traced.api.application``).
"""

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from store.errors import NotFound, StoreError, StoreUnavailable
from traced.api.auth import Caller, Door
from traced.api.control import Control
from traced.api.errors import BadRequest, ServiceError
from traced.api.routes import (
    approvals,
    capabilities,
    environments,
    events,
    overview,
    prompts,
    serving,
    trainings,
    trajectories,
)
from traced.api.routes import overview as glance
from traced.api.routes.events import stream
from traced.client.environments import Answer, Begin, Played, Said
from traced.client.models import (
    Approval,
    Decided,
    Done,
    Problem,
    Readiness,
    Reason,
)
from traced.core.errors import TracedError
from traced.registry import decisions


def routers(control: Control, door: Door) -> list[APIRouter]:
    """The paths of every subject; ``door`` says who asks, where an answer tells."""
    subjects = (approvals, capabilities, environments, events, overview, prompts, serving, trainings, trajectories)
    return [glance.status_router(control, door), *(subject.router(control) for subject in subjects)]


DESCRIBED = "GET /openapi.json"  # where it is said what can be asked

log = logging.getLogger(__name__)


def control_api(control: Control, door: Door, ready: Callable[[], Readiness], metrics: Callable[[], bytes]) -> FastAPI:
    """The application; ``door`` says who asks, ``ready`` which parts are dead, ``metrics`` is Prometheus text."""
    app = FastAPI(title="traced", version="1", docs_url=None, redoc_url=None)

    async def turn() -> AsyncIterator[None]:
        async with control.readings.one():
            yield

    in_turn = Depends(turn, scope="function")  # given back before the answer is sent, however slowly it is taken
    checked = [Depends(door), Depends(_without_nul)]
    app.include_router(_health(ready))
    app.include_router(_figures(metrics), dependencies=[in_turn])
    for router in routers(control, door):
        app.include_router(router, dependencies=[*checked, in_turn])
    for router in (stream(control, door), _acts(control, door), _plays(control, door)):
        app.include_router(router, dependencies=checked)
    for kind in (TracedError, StoreError, SQLAlchemyError, Exception):
        app.add_exception_handler(kind, _problem)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _no_such_call)
    return app


def _health(ready: Callable[[], Readiness]) -> APIRouter:
    router = APIRouter()

    @router.get("/alive")
    def alive() -> dict[str, bool]:
        """The process answers."""
        return {"alive": True}

    @router.get("/ready", response_model=Readiness)
    def readiness() -> JSONResponse:
        """Whether every part can work; 503 names those that cannot."""
        found = ready()
        return JSONResponse(found.model_dump(), 200 if found.ready else 503)

    return router


def _figures(metrics: Callable[[], bytes]) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> PlainTextResponse:
        """Figures in Prometheus' text format."""
        return PlainTextResponse(metrics(), media_type=CONTENT_TYPE_LATEST)

    return router


def _acts(control: Control, door: Door) -> APIRouter:
    router = APIRouter()
    Who = Annotated[Caller, Depends(door)]

    @router.post("/cycles")
    def start(asked: Reason, caller: Who) -> Done:
        """Ask for a cycle; it begins once no other is unfinished."""
        return control.start(caller, asked)

    @router.post("/cycles/{cycle_id}/cancel")
    async def cancel(cycle_id: str, asked: Reason, caller: Who) -> Done:
        """End an unfinished cycle for good."""
        return await control.cancel(caller, cycle_id, asked)

    @router.post("/trainings/{run:path}/stop")
    async def stop_training(run: str, asked: Reason, caller: Who) -> Done:
        """End a training at its next safe point; its cycle goes on without the capability."""
        return await control.stop_training(caller, run, asked)

    @router.post("/pause")
    async def pause(asked: Reason, caller: Who) -> Done:
        """Stop at the next safe point, and begin no cycle until resumed."""
        return await control.pause(caller, asked)

    @router.post("/resume")
    def resume(asked: Reason, caller: Who) -> Done:
        """Go on after a pause."""
        return control.resume(caller, asked)

    @router.post("/adapters/{adapter}/approve")
    def approve(adapter: str, asked: Approval, caller: Who) -> Done:
        """Approve an adapter that passed its gate and put it live."""
        chosen = control.settings.promotion
        policy = asked.policy or chosen.policy
        how = partial(decisions.approve, adapter=adapter, policy=policy, steps=chosen.steps, seen=asked.seen)
        return control.decide(caller, asked, how)

    @router.post("/adapters/{adapter}/reject")
    def reject(adapter: str, asked: Decided, caller: Who) -> Done:
        """Decide against an adapter."""
        return control.decide(caller, asked, partial(decisions.reject, adapter=adapter, seen=asked.seen))

    @router.post("/adapters/{adapter}/more-episodes")
    def more_episodes(adapter: str, asked: Decided, caller: Who) -> Done:
        """Have the gate of an adapter that waits take its next look, on more episodes."""
        rounds = control.settings.gate.max_rounds
        how = partial(decisions.more_episodes, adapter=adapter, rounds=rounds, seen=asked.seen)
        return control.decide(caller, asked, how)

    @router.post("/adapters/{adapter}/rollback")
    def roll_back(adapter: str, asked: Reason, caller: Who) -> Done:
        """Undo the promotion of one adapter."""
        return control.decide(caller, asked, partial(decisions.roll_back, adapter=adapter))

    @router.post("/prompts/{patch}/approve")
    def approve_prompt(patch: str, asked: Reason, caller: Who) -> Done:
        """Take a prompt that is enough for its capability, instead of an adapter."""
        return control.decide(caller, asked, partial(decisions.approve_prompt, patch=patch))

    @router.post("/prompts/{patch}/reject")
    def reject_prompt(patch: str, asked: Reason, caller: Who) -> Done:
        """Decide against a prompt."""
        return control.decide(caller, asked, partial(decisions.reject_prompt, patch=patch))

    @router.post("/rollback")
    def roll_back_last(asked: Reason, caller: Who) -> Done:
        """Undo the last promotion."""
        return control.decide(caller, asked, partial(decisions.roll_back, adapter=None))

    @router.post("/reload")
    def reload(asked: Reason, caller: Who) -> Done:
        """Read the settings again, as SIGHUP does."""
        return control.reload(caller, asked)

    @router.post("/parked/{parked_id}/release")
    def release(parked_id: str, asked: Reason, caller: Who) -> Done:
        """Let a parked input be tried again."""
        return control.decide(caller, asked, partial(decisions.release, parked_id=parked_id))

    return router


def _plays(control: Control, door: Door) -> APIRouter:
    router = APIRouter()
    Who = Annotated[Caller, Depends(door)]

    @router.post("/environments/{environment}/play")
    async def play(environment: str, asked: Begin, caller: Who, request: Request) -> Played:
        """Begin an episode by hand, in a container of its own."""
        return await control.play(caller, environment, asked, request.is_disconnected)

    @router.post("/episodes/{episode}/say")
    async def say(episode: str, said: Said, caller: Who) -> Answer:
        """Send an assistant message; the messages that follow, and the score once the episode is done."""
        return await control.say(caller, episode, said)

    @router.post("/episodes/{episode}/end")
    async def end(episode: str, asked: Reason, caller: Who) -> Done:
        """End an episode; its container is removed."""
        return await control.end_play(caller, episode, asked)

    return router


def _problem(request: Request, error: Exception) -> JSONResponse:
    told = Problem(
        type=type(error).__name__, message=getattr(error, "message", str(error)), hint=getattr(error, "hint", "")
    )
    if not isinstance(error, TracedError | StoreError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        told = Problem(type=type(error).__name__, message="a defect of traced; its traceback is in the log")
    after_s = getattr(error, "retry_after_s", None)
    return JSONResponse(told.model_dump(), _status(error), {"Retry-After": str(after_s)} if after_s else None)


def _bad_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _problem(request, BadRequest(f"{where}: {first['msg']}", hint=DESCRIBED))


def _no_such_call(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI itself refuses: a path that there is not, a method that a path does not take."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    kind = HTTPStatus(error.status_code).phrase.title().replace(" ", "")
    told = Problem(type=kind, message=f"{asked}: {error.detail}", hint=DESCRIBED)
    return JSONResponse(told.model_dump(), error.status_code, error.headers)


async def _without_nul(request: Request) -> None:
    """Raises ``BadRequest``."""
    if any("\0" in text for text in (request.scope["path"], *request.query_params.values())):
        raise BadRequest("no name and no text that is kept has a NUL character in it", hint="leave the %00 out")


def _status(error: Exception) -> int:
    if isinstance(error, ServiceError):
        return error.status
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, StoreUnavailable):
        return 503
    return 409 if isinstance(error, TracedError | StoreError) else 500
