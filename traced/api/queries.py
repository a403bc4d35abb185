"""What the store knows, as the control API shows it.

Invariants: nothing here writes; every function takes one session, so that what it shows is of one moment.

How the router is: asked of itself where its address is known, and of the store.

Invariants: nothing is changed by asking; the router's answer is waited for ``PATIENCE_S`` at most. How it fails: a
router that does not answer is a state of it, with the reason; the store's errors are the caller's. It blocks: call it
from a thread. Not covered: a router elsewhere, whose address the settings do not tell.

Turns at reading the store: however many look, and however slowly the store answers them, the work goes on.

Invariants: at most ``at_once`` have a turn at a time, each with one thread and one connection at most; who waits has
neither. Turns come in the order of asking. The control API's readings (``READINGS``) and its event streams
(``STREAMS``) together take fewer connections than the store's pool gives (15): the rest is the cycle's and the acts'.
How it fails: ``Crowded`` for who has waited ``PATIENCE_S`` for a turn; who is patient waits as long as it takes.
It belongs to one event loop. Not covered: how long a turn lasts.

How much is asked for at once.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Annotated

import httpx
import sqlalchemy
from fastapi import Query
from pydantic import BaseModel
from sqlmodel import Session

from store.database import reading
from store.records import Cycle
from store.repositories.adapters import list_adapters
from store.repositories.attempts import attempts_at_parked, blocked_attempts, list_parked
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.llm_replies import StageCost, stage_costs
from store.repositories.promotions import latest_answers, latest_decisions, live_adapters, trials
from store.repositories.serving import traffic
from store.status import RouterStanding, router_standing
from traced.api.errors import Crowded
from traced.client.models import AdapterView, CostView, CycleView, HeldUpView, ParkedView, StageView
from traced.client.serving import Health, RouterHealth, Traffic
from traced.config.service_sections import ServingSection

CYCLES_SHOWN = 10


def cycles(session: Session, *, limit: int = CYCLES_SHOWN) -> list[CycleView]:
    """The newest cycles, each with the newest event of its stages."""
    return [cycle_view(session, cycle) for cycle in list_cycles(session, limit=limit)]


def cycle_view(session: Session, cycle: Cycle) -> CycleView:
    """One cycle with the newest event of each of its stages, in the order of their beginning."""
    newest: dict[tuple[str, str | None], StageView] = {}
    for event in list_stage_events(session, cycle.id):
        newest[event.stage, event.capability] = StageView(
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
        stages=list(newest.values()),
        costs=_costs(session, cycle.id),
    )


def _costs(session: Session, cycle_id: str) -> list[CostView]:
    """What a cycle's stages paid for, all capabilities together."""
    found: dict[str, list[StageCost]] = {}
    for one in stage_costs(session, cycle_id):
        found.setdefault(one.stage, []).append(one)
    return [
        CostView(
            stage=stage,
            calls=sum(one.calls for one in costs),
            prompt_tokens=sum(one.prompt_tokens for one in costs),
            completion_tokens=sum(one.completion_tokens for one in costs),
            cost=sum(one.cost for one in costs),
            seconds=sum(one.seconds for one in costs),
            estimated=sum(one.estimated for one in costs),
        )
        for stage, costs in found.items()
    ]


def adapters(session: Session) -> list[AdapterView]:
    """All adapter versions, oldest first."""
    live = {promotion.adapter for promotion in live_adapters(session)}
    on_trial = {one.promotion.adapter: one.promotion for one in trials(session)}
    conversations, answers, decisions = traffic(session), latest_answers(session), latest_decisions(session)
    return [
        AdapterView(
            name=version.name,
            capability=version.capability,
            cycle_id=version.cycle_id,
            gate=answers[version.name].value if version.name in answers else "none",
            decision=decisions[version.name].value if version.name in decisions else "none",
            live=version.name in live,
            conversations=conversations.get(version.name, 0),
            trial=on_trial[version.name].state.value if version.name in on_trial else "",
            share=on_trial[version.name].share if version.name in on_trial else None,
        )
        for version in list_adapters(session)
    ]


def parked(session: Session, *, with_evidence: bool = False) -> list[ParkedView]:
    """Inputs that are left aside now, newest first."""
    found = list_parked(session)
    tried = attempts_at_parked(session) if found else Counter()
    return [
        ParkedView(
            id=one.id,
            cycle_id=one.cycle_id,
            stage=one.key.stage,
            capability=one.key.capability,
            reason=one.reason,
            at=one.at,
            tried=tried[one.key],
            evidence=one.evidence if with_evidence else {},
        )
        for one in found
    ]


def held_up(session: Session) -> list[HeldUpView]:
    """Stages of unfinished cycles that wait for something outside."""
    return [
        HeldUpView(
            cycle_id=one.cycle_id,
            stage=one.key.stage,
            capability=one.key.capability,
            reason=str(one.evidence.get("detail", "")),
            at=one.started_at,
        )
        for one in blocked_attempts(session)
    ]


def waiting(shown: Sequence[AdapterView]) -> list[str]:
    """Those whose gate passed and about which nobody has decided."""
    return [one.name for one in shown if one.gate == "pass" and one.decision == "none"]


ROUTER_TIMEOUT_S = 1.0
ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
TOLD = 50  # models, statuses and engines; the rest is left out


class _Ready(BaseModel):
    """The router's ``GET /ready``."""

    ready: bool
    engines: dict[str, str]
    recording: str


def health(section: ServingSection, store: sqlalchemy.Engine, now: datetime) -> Health:
    """The router and its traffic at this moment."""
    with reading(store) as opened:
        if opened.get_bind().dialect.name == "postgresql":
            opened.execute(sqlalchemy.text("SET LOCAL TIME ZONE 'UTC'"))
        standing = router_standing(opened.connection().connection.driver_connection, now)
    return Health(router=router_health(section), traffic=_traffic(standing))


def router_health(section: ServingSection) -> RouterHealth:
    """What the router says of itself and its engines."""
    expected = section.with_service
    if not section.port:
        return RouterHealth(state="unknown", address="", expected=expected)
    host = ANYWHERE.get(section.host, section.host)
    address = f"http://[{host}]:{section.port}" if ":" in host else f"http://{host}:{section.port}"
    try:
        answer = httpx.get(f"{address}/ready", timeout=ROUTER_TIMEOUT_S, trust_env=False)
        told = _Ready.model_validate_json(answer.content)
    except httpx.HTTPError as error:
        return RouterHealth(state="away", address=address, expected=expected, trouble=str(error) or "no answer in time")
    except ValueError:
        return RouterHealth(state="away", address=address, expected=expected, trouble="what answers there is no router")
    return RouterHealth(
        state="ready" if told.ready else "not ready",
        address=address,
        expected=expected,
        engines=dict(list(told.engines.items())[:TOLD]),
        trouble="" if told.recording == "ok" else f"recording: {told.recording}",
    )


def _traffic(standing: RouterStanding) -> Traffic:
    return Traffic(
        hour=dict(list(standing.hour.items())[:TOLD]),
        day=dict(list(standing.day.items())[:TOLD]),
        failures=dict(list(standing.failures.items())[:TOLD]),
        by_default=standing.by_default,
        unsettled=standing.unsettled,
        outcomes=standing.outcomes,
        partial=standing.partial,
    )


READINGS, STREAMS = 6, 2
TURN_TIMEOUT_S = 5.0


class Turns:
    """So many at once."""

    def __init__(self, at_once: int, patience_s: float = TURN_TIMEOUT_S) -> None:
        self.at_once = at_once
        self.patience_s = patience_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def one(self, *, patient: bool = False) -> AsyncIterator[None]:
        """A turn while the body runs. Raises ``Crowded``, unless ``patient``."""
        try:
            async with asyncio.timeout(None if patient else self.patience_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Crowded(
                f"too many look at once: no turn of {self.at_once} came free within {self.patience_s:g} s",
                hint=f"ask again in {Crowded.retry_after_s} s",
            ) from error
        try:
            yield
        finally:
            self._free.release()


Limit = Annotated[int, Query(ge=1, le=1000)]
