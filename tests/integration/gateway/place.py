"""A router over scripted engines, on a store with one capability whose versions are promoted by hand."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import Exchange, Promotion, PromotionState
from store.repositories import adapters, gates, promotions, serving
from store.repositories import adapters as training
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import GateAnswer, Trajectory
from tests.integration.gateway.upstream import Upstream, upstreams
from tests.unit.store import chain
from tests.waiting import eventually_async
from traced.config.cycle_sections import Policy
from traced.config.settings import Settings, load_settings
from traced.gateway.recorder import Recorder
from traced.gateway.server import open_gateway

POLL_S = 0.02
V1, V2 = "date-reasoning@v1", "date-reasoning@v2"
USER: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which day is it?"}]


@dataclass
class RunningGateway:
    """The router's URL with a client, the engines behind it, and the store."""

    url: str
    http: httpx.AsyncClient
    engines: list[Upstream]
    store: Engine
    settings: Settings

    @property
    def engine(self) -> Upstream:
        """The only engine."""
        (engine,) = self.engines
        return engine

    async def ask(self, model: str = "auto", messages: Any = USER, **options: Any) -> httpx.Response:
        """One chat completion; ``headers`` among ``more`` are the request's."""
        headers = options.pop("headers", None)
        body = {"model": model, "messages": messages, **options}
        return await self.http.post("/v1/chat/completions", content=json.dumps(body), headers=headers)

    def promote(self, name: str) -> None:
        """Put a version live."""
        with write_session(self.store) as session:
            gates.save_approval(session, chain.approval(name))
            promotions.promote(session, name, actor="Ada", at=datetime.now(UTC))

    def begin(self, name: str, policy: Policy, share: float = 0.5) -> None:
        """Put a version on trial, as a person who approves it does."""
        with write_session(self.store) as session:
            gates.save_approval(session, chain.approval(name))
            promotion = Promotion(name, PromotionState(policy), "Ada", chain.later(8))
            promotions.put_on_trial(session, replace(promotion, share=share if policy == "canary" else None))

    def roll_back(self, name: str) -> None:
        """Undo it."""
        with write_session(self.store) as session:
            promotions.roll_back(session, name, actor="Ada", at=datetime.now(UTC))

    def exchanges(self, conversation_id: str) -> list[Exchange]:
        """What the store has of a conversation."""
        with read_session(self.store) as session:
            return serving.list_exchanges(session, conversation_id)

    def trajectories(self) -> list[Trajectory]:
        """What production's conversations have become."""
        with read_session(self.store) as session:
            trajectories = list_trajectories(session, TrajectoryFilter(source="desk"))
        return [trajectory for trajectory in trajectories if trajectory.id.startswith("router-")]


async def models(place: RunningGateway) -> list[str]:
    """What the router offers."""
    return [entry["id"] for entry in (await place.http.get("/v1/models")).json()["data"]]


async def until_offered(place: RunningGateway, name: str, is_offered: bool = True) -> None:
    """Wait until the router offers a model, or no longer does."""

    async def is_as_expected() -> bool:
        return (name in await models(place)) is is_offered

    await eventually_async(is_as_expected)


@asynccontextmanager
async def running_gateway(
    tmp_path: Path,
    *,
    engines: int = 1,
    live: str = "",
    settings: dict[str, Any] | None = None,
    urls: Sequence[str] = (),
    refuses_loads: Sequence[int] = (),
) -> AsyncIterator[RunningGateway]:
    """A router with so many engines and those at ``urls``, and ``live`` promoted before it starts.

    The engines with the numbers ``refuses_loads`` load no adapter.
    """
    # A routing decision may take as long as a busy machine needs.
    defaults = {"serving.port": 0, "serving.routing_timeout_s": 60.0, "routing.router": "labels"}
    overrides = {**defaults, **(settings or {})}
    loaded_settings = load_settings(tmp_path, overrides)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    try:
        _versions(store, tmp_path)
        async with upstreams(engines) as behind:
            for number in refuses_loads:
                behind[number].refuses_loads = True
            gateway = RunningGateway("", None, behind, store, loaded_settings)  # type: ignore[arg-type]
            if live:
                gateway.promote(live)
            storer = Recorder(loaded_settings, store)
            async with (
                storing(storer),
                open_gateway(loaded_settings, store, [*(engine.url for engine in behind), *urls]) as url,
                httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http,
            ):
                gateway.url, gateway.http = url, http
                yield gateway
    finally:
        store.dispose()


@asynccontextmanager
async def storing(storer: Recorder) -> AsyncIterator[None]:
    """What is a process of its own beside a real router, on a thread."""
    thread = threading.Thread(target=storer.run)
    thread.start()
    try:
        yield
    finally:
        storer.stopped.set()
        await asyncio.to_thread(thread.join)


def _versions(store: Engine, data_dir: Path) -> None:
    with write_session(store) as session:
        chain.save_origin(session)
        training.save_training_run(session, chain.training_run())
        for version in (1, 2):
            adapter = chain.with_files(chain.adapter(version), data_dir)
            adapters.save_adapter(session, adapter)
            gate = chain.GATE.__class__(adapter.name, GateAnswer.PASS, chain.GATE.comparisons, 2)
            gates.save_gate(session, gate, cycle_id="c1", at=chain.later(6))
