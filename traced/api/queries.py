"""Read-only queries of the control API, the router's health, and the limit on concurrent readers.

Invariants: nothing is written; a query takes one session, so that its result is consistent. At most ``at_once`` readers
hold a slot (one thread, one connection each); a waiting reader holds neither. How it fails: ``Crowded`` after
``TURN_TIMEOUT_S`` without a slot; a router that does not respond is reported as a state, not as an error.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated, Any

import httpx
import sqlalchemy
from fastapi import Query
from pydantic import BaseModel
from sqlmodel import Session

from store.database import read_session
from store.records import Cycle
from store.repositories.adapters import list_adapters, quarantined_adapters
from store.repositories.attempts import blocked_attempts, count_attempts_on_quarantined, list_quarantined
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.gates import latest_answers, latest_decisions
from store.repositories.llm_replies import StageCost, stage_costs
from store.repositories.promotions import base_models, live_adapters, trials
from store.repositories.serving import count_routed
from store.status import RouterStatus, router_status
from store.types import awaits_decision
from traced.api.errors import Crowded
from traced.client.models import (
    AdapterView,
    BlockedStageView,
    CostView,
    CycleView,
    LiveStepView,
    QuarantinedInputView,
    StageView,
)
from traced.client.serving import Health, RouterHealth, Traffic
from traced.config.service_sections import ServingSection
from traced.core.location import http_url

CYCLES_SHOWN = 10


def cycles(session: Session, *, limit: int = CYCLES_SHOWN) -> list[CycleView]:
    """Return the newest cycles, each with the newest event of every stage."""
    return [cycle_view(session, cycle) for cycle in list_cycles(session, limit=limit)]


def cycle_view(session: Session, cycle: Cycle) -> CycleView:
    """Return a cycle with the newest event of each stage, in the order in which the stages began."""
    stages: dict[tuple[str, str | None], StageView] = {}
    for event in list_stage_events(session, cycle.id):
        stages[event.stage, event.capability] = StageView(
            stage=event.stage, capability=event.capability, state=event.state.value, at=event.at, detail=event.detail
        )
    return CycleView(
        id=cycle.id,
        target=cycle.target,
        model=cycle.model,
        seed=cycle.seed,
        state=cycle.state.value,
        created_at=cycle.created_at,
        finished_at=cycle.finished_at,
        stages=list(stages.values()),
        costs=_costs(session, cycle.id),
        step=_step(cycle),
    )


def _step(cycle: Cycle) -> LiveStepView | None:
    """Return what a cycle did to the live system by its summary; reports of earlier versions say nothing of it."""
    step = cycle.summary.get("step")
    if not isinstance(step, dict):
        return None
    values = {name: step[name] for name in LiveStepView.model_fields if name in step}
    new = [adapter["name"] for adapter in cycle.summary.get("adapters", []) if adapter["promoted"]]
    return LiveStepView(**values | {"new": new, "left_aside": list(step.get("left_aside", {}))})


def _costs(session: Session, cycle_id: str) -> list[CostView]:
    """Return the costs of the language model by stage, summed over capabilities."""
    by_stage: dict[str, list[StageCost]] = {}
    for entry in stage_costs(session, cycle_id):
        by_stage.setdefault(entry.stage, []).append(entry)
    return [
        CostView(
            stage=stage,
            calls=sum(entry.calls for entry in costs),
            prompt_tokens=sum(entry.prompt_tokens for entry in costs),
            completion_tokens=sum(entry.completion_tokens for entry in costs),
            cost=sum(entry.cost for entry in costs),
            seconds=sum(entry.seconds for entry in costs),
            estimated=sum(entry.estimated for entry in costs),
        )
        for stage, costs in by_stage.items()
    ]


def adapters(session: Session) -> list[AdapterView]:
    """Return all adapter versions, oldest first."""
    live = {promotion.adapter for promotion in live_adapters(session)}
    on_trial = {trial.promotion.adapter: trial.promotion for trial in trials(session)}
    conversations, answers, decisions = count_routed(session), latest_answers(session), latest_decisions(session)
    quarantined, models = quarantined_adapters(session), base_models(session)
    return [
        AdapterView(
            name=version.name,
            capability=version.capability,
            cycle_id=version.cycle_id,
            model=models[version.name],
            gate=answers[version.name].value if version.name in answers else "none",
            decision=decisions[version.name].value if version.name in decisions else "none",
            live=version.name in live,
            conversations=conversations.get(version.name, 0),
            trial=on_trial[version.name].state.value if version.name in on_trial else "",
            share=on_trial[version.name].share if version.name in on_trial else None,
            quarantine=quarantined.get(version.name, ""),
        )
        for version in list_adapters(session)
    ]


def quarantined_inputs(session: Session, *, with_evidence: bool = False) -> list[QuarantinedInputView]:
    """Return the quarantined inputs, newest first; evidence only with ``with_evidence``."""
    quarantined = list_quarantined(session)
    attempts = count_attempts_on_quarantined(session) if quarantined else Counter()
    return [
        QuarantinedInputView(
            id=entry.id,
            cycle_id=entry.cycle_id,
            stage=entry.key.stage,
            capability=entry.key.capability,
            reason=entry.reason,
            at=entry.at,
            tried=attempts[entry.key],
            evidence=entry.evidence if with_evidence else {},
        )
        for entry in quarantined
    ]


def blocked_stages(session: Session) -> list[BlockedStageView]:
    """Return the stages of unfinished cycles that the infrastructure blocks."""
    return [
        BlockedStageView(
            cycle_id=attempt.cycle_id,
            stage=attempt.key.stage,
            capability=attempt.key.capability,
            reason=str(attempt.evidence.get("detail", "")),
            at=attempt.started_at,
        )
        for attempt in blocked_attempts(session)
    ]


def waiting(views: Sequence[AdapterView]) -> list[str]:
    """Return the names of the adapter versions that passed the gate and await a decision."""
    return [view.name for view in views if awaits_decision(view.gate, decided=view.decision != "none")]


ROUTER_TIMEOUT_S = 1.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
MAX_ITEMS = 50  # maximum number of models, of statuses and of engines in a response


class _Ready(BaseModel):
    """The response of the router to ``GET /ready``."""

    ready: bool
    engines: dict[str, str]
    recording: str
    routing: dict[str, dict[str, Any]] = {}
    refused_adapters: dict[str, str] = {}
    engine_sources: dict[str, str] = {}

    @property
    def trouble(self) -> str:
        """What is wrong beside the engines, in words; "" if nothing is."""
        troubles = [] if self.recording == "ok" else [f"recording: {self.recording}"]
        troubles += [f"engines of {entry}: {reason}" for entry, reason in self.engine_sources.items()]
        troubles += [f"{name}: {reason}" for name, reason in self.refused_adapters.items()]
        for state in self.routing.values():
            troubles += [f"routing by {name}: {reason}" for name, reason in (state.get("excluded") or {}).items()]
        return "; ".join(dict.fromkeys(troubles))


def health(section: ServingSection, store: sqlalchemy.Engine, now: datetime) -> Health:
    """Return the state and the traffic of the router."""
    with read_session(store) as session:
        # SQL truncates to hours and days in the session's time zone, which PostgreSQL takes from its settings.
        if session.get_bind().dialect.name == "postgresql":
            session.execute(sqlalchemy.text("SET LOCAL TIME ZONE 'UTC'"))
        status = router_status(session.connection().connection.driver_connection, now)
    return Health(router=router_health(section), traffic=_traffic(status))


def router_health(section: ServingSection) -> RouterHealth:
    """Query the readiness of the router; blocks for at most ``ROUTER_TIMEOUT_S`` per network step."""
    expected = section.with_service
    if not section.port:
        return RouterHealth(state="unknown", address="", expected=expected)
    host = ANYWHERE.get(section.host, section.host)
    address = http_url(host, section.port)
    try:
        response = httpx.get(f"{address}/ready", timeout=ROUTER_TIMEOUT_S, trust_env=False)
        report = _Ready.model_validate_json(response.content)
    except httpx.HTTPError as error:
        return RouterHealth(state="away", address=address, expected=expected, trouble=str(error) or "no answer in time")
    except ValueError:
        return RouterHealth(
            state="away", address=address, expected=expected, trouble="another program answers at this address"
        )
    return RouterHealth(
        state="ready" if report.ready else "not ready",
        address=address,
        expected=expected,
        engines=dict(list(report.engines.items())[:MAX_ITEMS]),
        trouble=report.trouble,
    )


def _traffic(status: RouterStatus) -> Traffic:
    return Traffic(
        hour=dict(list(status.hour.items())[:MAX_ITEMS]),
        day=dict(list(status.day.items())[:MAX_ITEMS]),
        failures=dict(list(status.failures.items())[:MAX_ITEMS]),
        by_default=status.by_default,
        unsettled=status.unsettled,
        outcomes=status.outcomes,
        partial=status.partial,
    )


# Together fewer than the 15 connections of the store's pool: the others are for the cycle and for actions.
# Together fewer than the store has connections (15). Decisions wait for each other in the store anyway.
READINGS, STREAMS, DECISIONS, ROLLBACKS = 6, 2, 3, 2
TURN_TIMEOUT_S = 5.0


class Turns:
    """A limit on concurrent readers, who get slots in the order of their requests; belongs to one event loop."""

    def __init__(self, at_once: int, patience_s: float = TURN_TIMEOUT_S) -> None:
        self.at_once = at_once
        self.patience_s = patience_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self, *, patient: bool = False) -> AsyncIterator[None]:
        """Hold a slot during the block; raises ``Crowded`` after waiting ``patience_s``, unless ``patient``."""
        try:
            async with asyncio.timeout(None if patient else self.patience_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Crowded(
                f"{self.at_once} requests are read at the same time; no slot became free within {self.patience_s:g} s",
                hint=f"repeat the request in {Crowded.retry_after_s} s",
            ) from error
        try:
            yield
        finally:
            self._free.release()


Limit = Annotated[int, Query(ge=1, le=1000)]
