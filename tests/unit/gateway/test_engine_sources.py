"""Engines that join and leave: the pool while requests run, and the follower while its sources fail."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine as StoreEngine

from store.database import open_store, sqlite_url, write_session
from store.errors import StoreUnavailable
from store.repositories.routers import add_engine, remove_engine
from tests.unit.gateway.test_engine_checks import Engine
from tests.unit.store.chain import T0
from tests.waiting import eventually_async
from traced.gateway import engine_sources, engines
from traced.gateway.engine_sources import EngineFollower
from traced.gateway.engines import Pool, Replica
from traced.inference.errors import EngineError

A, B, NAME = "http://a:1", "http://b:1", "dns+http://vllm:1"


class AdapterEngine(Engine):
    """An engine that loads adapters."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.adapters: list[str] = []
        self.is_closed = False
        self.checks = 0

    async def health(self) -> bool:
        self.checks += 1
        return await super().health()

    async def bases_and_adapters(self) -> tuple[list[str], list[str]]:
        return ["own-name"], list(self.adapters)

    async def load_adapter(self, name: str, path: Path) -> None:
        self.adapters.append(name)

    async def unload_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    async def aclose(self) -> None:
        self.is_closed = True


def connect(url: str) -> Replica:
    client: Any = AdapterEngine(url)
    return Replica(client)


def urls(pool: Pool) -> list[str]:
    return [replica.url for replica in pool.replicas]


@contextlib.asynccontextmanager
async def running(*tasks: Callable[[], Any]) -> AsyncIterator[None]:
    running_tasks = [asyncio.create_task(task()) for task in tasks]
    try:
        yield
    finally:
        for task in running_tasks:
            task.cancel()
        results = await asyncio.gather(*running_tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "POLL_S", 0.01)
    monkeypatch.setattr(engine_sources, "POLL_S", 0.01)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[StoreEngine]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield store
    store.dispose()


async def test_an_engine_that_joins_is_checked_and_has_the_adapters_before_it_gets_their_requests() -> None:
    pool = Pool([], 8, adapters={"dates@v1": Path("dates")})
    async with running(pool.run):
        pool.set_engines([A], connect)
        assert (urls(pool), pool.pick("base", "c")) == ([A], None)
        await eventually_async(lambda: pool.serves("dates@v1"))
        (replica,) = pool.replicas
        client: Any = replica.client
        assert (client.adapters, replica.preflight is not None) == (["dates@v1"], True)
        pool.set_engines([A, B], connect)
        await eventually_async(lambda: len([other for other in pool.replicas if other.serves("dates@v1")]) == 2)
        assert pool.replicas[0] is replica


async def test_an_engine_that_leaves_gets_no_new_request_and_is_dropped_when_the_running_ones_have_ended() -> None:
    pool = Pool([], 8)
    async with running(pool.run):
        pool.set_engines([A, B], connect)
        await eventually_async(lambda: all(replica.healthy for replica in pool.replicas))
        leaving, other = pool.replicas
        client: Any = leaving.client
        with leaving.request("base"):
            pool.set_engines([B], connect)
            assert all(pool.pick("base", f"c-{number}") is other for number in range(20))
            client.checks = 0
            await eventually_async(lambda: client.checks >= 3)
            assert (urls(pool), client.is_closed) == ([A, B], False)
            assert leaving.status == "leaving: 1 requests run"
        await eventually_async(lambda: client.is_closed)
        assert urls(pool) == [B]
        assert pool.pick("base", "c") is other
        # Its tasks have ended: nothing checks it.
        client.checks = 0
        other_client: Any = other.client
        other_client.checks = 0
        await eventually_async(lambda: other_client.checks >= 3)
        assert client.checks == 0


async def test_an_engine_that_is_back_while_its_requests_run_serves_on() -> None:
    pool = Pool([], 8)
    async with running(pool.run):
        pool.set_engines([A], connect)
        await eventually_async(lambda: pool.serves("base"))
        (replica,) = pool.replicas
        with replica.request("base"):
            pool.set_engines([], connect)
            assert pool.pick("base", "c") is None
            pool.set_engines([A], connect)
            assert pool.pick("base", "c") is replica
        pool.set_engines([], connect)
        await eventually_async(lambda: not pool.replicas)
        pool.set_engines([A], connect)
        await eventually_async(lambda: pool.serves("base"))
        assert pool.replicas[0] is not replica


async def test_an_engine_that_leaves_gets_no_further_adapter() -> None:
    pool = Pool([], 8)
    async with running(pool.run):
        pool.set_engines([A, B], connect)
        await eventually_async(lambda: all(replica.healthy for replica in pool.replicas))
        leaving, other = pool.replicas
        with leaving.request("base"):
            pool.set_engines([B], connect)
            pool.set_adapters({"dates@v1": Path("dates")})
            await eventually_async(lambda: other.serves("dates@v1"))
            client: Any = leaving.client
            client.checks = 0
            await eventually_async(lambda: client.checks >= 2)
            assert client.adapters == []


async def test_the_list_in_the_store_is_followed_beside_the_engines_of_the_settings(store: StoreEngine) -> None:
    pool = Pool([], 8)
    follower = EngineFollower(store, pool, ["http://own:1/v1", "store"], connect)
    await follower.refresh()
    assert urls(pool) == ["http://own:1"]
    async with running(pool.run, follower.run):
        with write_session(store) as session:
            add_engine(session, A, at=T0)
        await eventually_async(lambda: urls(pool) == ["http://own:1", A])
        with write_session(store) as session:
            remove_engine(session, A)
        await eventually_async(lambda: urls(pool) == ["http://own:1"])


async def test_a_source_that_fails_keeps_its_last_engines_and_is_named(
    store: StoreEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = []
    addresses = [A, B]

    async def resolve(entry: str) -> list[str]:
        if failures:
            raise failures[0]
        return addresses

    monkeypatch.setattr(engine_sources, "resolve", resolve)
    pool = Pool([], 8)
    follower = EngineFollower(store, pool, [NAME, "store"], connect)
    with caplog.at_level(logging.INFO):
        failures.append(EngineError("no such name"))
        await follower.refresh()
        assert (urls(pool), list(follower.problems)) == ([], [NAME])
        failures.clear()
        await follower.refresh()
        assert (urls(pool), follower.problems) == ([A, B], {})
        failures.append(EngineError("no such name"))
        for _ in range(3):
            await follower.refresh()
        assert urls(pool) == [A, B]
        assert not any(replica.leaving for replica in pool.replicas)
        assert follower.problems == {NAME: "no such name; its last engines stay in use: 2"}
        assert caplog.text.count("its last engines stay in use: 2") == 1
        failures.clear()
        addresses = [B]
        await follower.refresh()
        assert follower.problems == {}
        assert [replica.url for replica in pool.replicas if not replica.leaving] == [B]


async def test_a_store_that_is_away_removes_no_engine(store: StoreEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with write_session(store) as session:
        add_engine(session, A, at=T0)
    pool = Pool([], 8)
    follower = EngineFollower(store, pool, ["store"], connect)
    await follower.refresh()

    def away(*_: Any) -> Any:
        raise StoreUnavailable("the store is away")

    monkeypatch.setattr(engine_sources, "list_engines", away)
    await follower.refresh()
    assert (urls(pool), pool.replicas[0].leaving) == ([A], False)
    assert follower.problems == {"store": "the store is away; its last engines stay in use: 1"}


async def test_a_resolver_that_hangs_does_not_delay_the_list(
    store: StoreEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(entry: str) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(engine_sources, "resolve", resolve)
    pool = Pool([], 8)
    follower = EngineFollower(store, pool, [NAME, "store"], connect)
    async with running(follower.run):
        with write_session(store) as session:
            add_engine(session, A, at=T0)
        await eventually_async(lambda: urls(pool) == [A])


async def test_an_engine_of_two_sources_stays_until_both_have_dropped_it(
    store: StoreEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = [A]

    async def resolve(entry: str) -> list[str]:
        return addresses

    monkeypatch.setattr(engine_sources, "resolve", resolve)
    with write_session(store) as session:
        add_engine(session, A, at=T0)
    pool = Pool([], 8)
    follower = EngineFollower(store, pool, [NAME, "store"], connect)
    await follower.refresh()
    assert urls(pool) == [A]
    addresses = []
    await follower.refresh()
    assert not pool.replicas[0].leaving
    with write_session(store) as session:
        remove_engine(session, A)
    await follower.refresh()
    assert pool.replicas[0].leaving
