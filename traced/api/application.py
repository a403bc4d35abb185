"""The control API: a FastAPI application over ``Control``, served on the Unix socket and on TCP.

Every error response has the form {"type", "message", "hint"}. ``/alive``, ``/ready``, ``/metrics`` and
``/openapi.json`` need no token. A defect answers 500 with the type's name; its traceback is only logged.
"""

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from store.errors import StoreError
from traced.api.auth import Caller, Door, with_request_key
from traced.api.control import Control
from traced.api.errors import BadRequest, CallerDisconnected, problem_of, status_of
from traced.api.queries import Turns
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
from traced.api.routes.events import stream
from traced.client.environments import Answer, EpisodeStart, PlayedEpisode, PlayedMessage
from traced.client.models import (
    Approval,
    DecisionRequest,
    Done,
    Problem,
    Readiness,
    Reason,
)
from traced.core.errors import TracedError
from traced.inference.model_files import base_name
from traced.registry import decisions


def routers(control: Control, door: Door) -> list[APIRouter]:
    """Return the read-only routers, one per subject; ``door`` authenticates the caller."""
    subjects = (approvals, capabilities, environments, events, overview, prompts, serving, trainings, trajectories)
    return [overview.status_router(control, door), *(subject.router(control) for subject in subjects)]


SCHEMA_HINT = "GET /openapi.json"  # the hint of every malformed request

log = logging.getLogger(__name__)


def control_api(control: Control, door: Door, ready: Callable[[], Readiness], metrics: Callable[[], bytes]) -> FastAPI:
    """Build the application.

    Args:
        control: the operations that the routes call.
        door: the dependency that authenticates the caller.
        ready: returns which parts of the service have failed.
        metrics: returns the metrics in Prometheus' text format.
    """
    app = FastAPI(title="traced", version="1", docs_url=None, redoc_url=None)

    async def turn() -> AsyncIterator[None]:
        async with control.readings.slot():
            yield

    # "function" scope returns the slot before the response is sent: a slow reader must not hold one.
    in_turn = Depends(turn, scope="function")
    access_checks = [Depends(door), Depends(_reject_nul)]
    app.include_router(_health_routes(ready))
    app.include_router(_metrics_routes(metrics), dependencies=[in_turn])
    for router in routers(control, door):
        app.include_router(router, dependencies=[*access_checks, in_turn])
    # No slot for these: decisions must pass while readers wait, and the stream takes its own slots.
    for router in (stream(control, door), _action_routes(control, door), _episode_routes(control, door)):
        app.include_router(router, dependencies=access_checks)
    for kind in (TracedError, StoreError, SQLAlchemyError, Exception):
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(RequestValidationError, _bad_request)
    app.add_exception_handler(HTTPException, _http_error)
    return app


def _health_routes(ready: Callable[[], Readiness]) -> APIRouter:
    router = APIRouter()

    @router.get("/alive")
    def alive() -> dict[str, bool]:
        """Liveness: the process answers."""
        return {"alive": True}

    @router.get("/ready", response_model=Readiness)
    def readiness() -> JSONResponse:
        """Readiness of each part of the service; status 503 if any part is not ready."""
        readiness_report = ready()
        return JSONResponse(readiness_report.model_dump(), 200 if readiness_report.ready else 503)

    return router


def _metrics_routes(metrics: Callable[[], bytes]) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> PlainTextResponse:
        """Metrics in the text format of Prometheus."""
        return PlainTextResponse(metrics(), media_type=CONTENT_TYPE_LATEST)

    return router


def _turn(turns: Turns) -> Any:
    """Return a dependency that waits for a slot in the event loop, without a thread or a connection to the store."""

    async def turn(request: Request) -> AsyncIterator[None]:
        async with turns.slot(patient=True):
            # Clients that repeat their requests would otherwise keep a slow service busy with those they gave up.
            if await request.is_disconnected():
                raise CallerDisconnected("the caller has gone; nothing was changed")
            yield

    return Depends(turn, scope="function")


def _action_routes(control: Control, door: Door) -> APIRouter:
    router = APIRouter()
    AuthenticatedCaller = Annotated[Caller, Depends(with_request_key(door))]
    decision, rollback = [_turn(control.deciding)], [_turn(control.rolling_back)]

    @router.post("/cycles", dependencies=decision)
    def start(body: Reason, caller: AuthenticatedCaller) -> Done:
        """Request a cycle; it starts at once or, if a cycle is unfinished, when that one has ended."""
        return control.start(caller, body)

    @router.post("/cycles/{cycle_id}/cancel")
    async def cancel(cycle_id: str, body: Reason, caller: AuthenticatedCaller) -> Done:
        """Cancel an unfinished cycle; it cannot be resumed."""
        return await control.cancel(caller, cycle_id, body)

    @router.post("/trainings/{run:path}/stop")
    async def stop_training(run: str, body: Reason, caller: AuthenticatedCaller) -> Done:
        """Stop a training at its next safe point; its cycle continues without the capability."""
        return await control.stop_training(caller, run, body)

    @router.post("/pause")
    async def pause(body: Reason, caller: AuthenticatedCaller) -> Done:
        """Pause the current cycle at its next safe point; no cycle starts until it is resumed."""
        return await control.pause(caller, body)

    @router.post("/resume", dependencies=decision)
    def resume(body: Reason, caller: AuthenticatedCaller) -> Done:
        """Resume a paused cycle and allow new cycles."""
        return control.resume(caller, body)

    @router.post("/adapters/{adapter}/approve", dependencies=decision)
    def approve(adapter: str, body: Approval, caller: AuthenticatedCaller) -> Done:
        """Approve an adapter that passed its gate; it then takes traffic by the promotion policy."""
        promotion = control.settings.promotion
        policy = body.policy or promotion.policy
        change = partial(decisions.approve, adapter=adapter, policy=policy, steps=promotion.steps, tag=body.tag)
        return control.approve(caller, body, adapter, change)

    @router.post("/adapters/{adapter}/reject", dependencies=decision)
    def reject(adapter: str, body: DecisionRequest, caller: AuthenticatedCaller) -> Done:
        """Reject an adapter; it takes no traffic."""
        return control.decide(caller, body, partial(decisions.reject, adapter=adapter, tag=body.tag))

    @router.post("/adapters/{adapter}/more-episodes", dependencies=decision)
    def more_episodes(adapter: str, body: DecisionRequest, caller: AuthenticatedCaller) -> Done:
        """Run another round of the gate of a pending adapter, on new seeds."""
        rounds = control.settings.gate.max_rounds
        change = partial(decisions.more_episodes, adapter=adapter, rounds=rounds, tag=body.tag)
        return control.decide(caller, body, change)

    @router.post("/adapters/{adapter}/rollback", dependencies=rollback)
    def roll_back(adapter: str, body: DecisionRequest, caller: AuthenticatedCaller) -> Done:
        """Roll back the promotion of the named adapter."""
        return control.roll_back(caller, body, partial(decisions.roll_back, adapter=adapter, tag=body.tag))

    @router.post("/prompts/{patch}/approve", dependencies=decision)
    def approve_prompt(patch: str, body: DecisionRequest, caller: AuthenticatedCaller) -> Done:
        """Approve a prompt patch that makes an adapter for its capability unnecessary."""
        return control.decide(caller, body, partial(decisions.approve_prompt, patch=patch, tag=body.tag))

    @router.post("/prompts/{patch}/reject", dependencies=decision)
    def reject_prompt(patch: str, body: DecisionRequest, caller: AuthenticatedCaller) -> Done:
        """Reject a prompt patch."""
        return control.decide(caller, body, partial(decisions.reject_prompt, patch=patch, tag=body.tag))

    @router.post("/rollback", dependencies=rollback)
    def roll_back_last(body: Reason, caller: AuthenticatedCaller) -> Done:
        """Roll back the last promotion; if that is rolled back already, nothing changes."""
        return control.roll_back(
            caller, body, partial(decisions.roll_back, adapter=None, model=base_name(control.settings))
        )

    @router.post("/reload")
    def reload(body: Reason, caller: AuthenticatedCaller) -> Done:
        """Reload the settings, as SIGHUP does."""
        return control.reload(caller, body)

    @router.post("/quarantined/{input_id}/release", dependencies=decision)
    def release(input_id: str, body: Reason, caller: AuthenticatedCaller) -> Done:
        """Release a quarantined input: the service retries it."""
        return control.decide(caller, body, partial(decisions.release, input_id=input_id))

    return router


def _episode_routes(control: Control, door: Door) -> APIRouter:
    router = APIRouter()
    AuthenticatedCaller = Annotated[Caller, Depends(door)]

    @router.post("/environments/{environment}/play")
    async def play(
        environment: str, body: EpisodeStart, caller: AuthenticatedCaller, request: Request
    ) -> PlayedEpisode:
        """Start an episode that the caller plays by hand, in its own container."""
        return await control.play(caller, environment, body, request.is_disconnected)

    @router.post("/episodes/{episode}/say")
    async def say(episode: str, message: PlayedMessage, caller: AuthenticatedCaller) -> Answer:
        """Send an assistant message; returns the following messages, and the score at the end of the episode."""
        return await control.say(caller, episode, message)

    @router.post("/episodes/{episode}/end")
    async def end(episode: str, body: Reason, caller: AuthenticatedCaller) -> Done:
        """End an episode and remove its container."""
        return await control.end_play(caller, episode, body)

    return router


def _error_response(request: Request, error: Exception) -> JSONResponse:
    problem = problem_of(error)
    if not isinstance(error, TracedError | StoreError):
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        problem = Problem(
            type=type(error).__name__,
            message="internal error, a defect of traced; the traceback is in the log of the service",
        )
    after_s = getattr(error, "retry_after_s", None)
    return JSONResponse(problem.model_dump(), status_of(error), {"Retry-After": str(after_s)} if after_s else None)


def _bad_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"])
    return _error_response(request, BadRequest(f"{location}: {first['msg']}", hint=SCHEMA_HINT))


def _http_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response to a request that FastAPI itself refuses: an unknown path or method."""
    assert isinstance(error, HTTPException)
    call = f"{request.method} {request.url.path}"
    kind = HTTPStatus(error.status_code).phrase.title().replace(" ", "")
    problem = Problem(type=kind, message=f"{call}: {error.detail}", hint=SCHEMA_HINT)
    return JSONResponse(problem.model_dump(), error.status_code, error.headers)


async def _reject_nul(request: Request) -> None:
    """Raise ``BadRequest`` for a NUL in the path or the query."""
    # PostgreSQL cannot store a NUL in a text.
    if any("\0" in text for text in (request.scope["path"], *request.query_params.values())):
        raise BadRequest("a NUL character is not allowed in the path or the query", hint="remove the %00")
