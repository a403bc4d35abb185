"""How many requests a minute a key gets: from one router, from several that share a store, and without the store."""

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store, sqlite_url
from tests.unit.store.chain import T0
from traced.gateway import quotas
from traced.gateway.errors import Refusal
from traced.gateway.quotas import Quotas


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store on a busy machine may take longer than a router waits for it."""
    monkeypatch.setattr(quotas, "LIMIT_S", 60.0)


class Clock:
    """The time of all routers in a test, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def router(self, store: Engine, *, has_peers: bool) -> Quotas:
        return Quotas(store, lambda: T0 + timedelta(seconds=self.seconds), lambda: has_peers, lambda: self.seconds)


async def admitted_count(router: Quotas, requests: int, per_minute: int) -> int:
    """Return how many of the requests of key "a" the router admits."""
    count = 0
    for _ in range(requests):
        try:
            await router.consume("a", per_minute)
        except Refusal:
            continue
        count += 1
    return count


async def refusal(router: Quotas, per_minute: int) -> Refusal:
    with pytest.raises(Refusal) as exc_info:
        await router.consume("a", per_minute)
    return exc_info.value


@pytest.mark.parametrize("has_peers", [False, True])
async def test_a_key_has_a_quota_per_minute(store: Engine, has_peers: bool) -> None:
    clock = Clock()
    router = clock.router(store, has_peers=has_peers)
    assert await admitted_count(router, 3, 3) == 3
    error = await refusal(router, 3)
    assert (error.status, error.code, error.retry_after) == (429, "quota_exceeded", 20)
    await router.consume("b", 3)
    await router.consume("c", 0)
    clock.seconds = 20.0
    assert await admitted_count(router, 3, 3) == 1
    clock.seconds = 1e6
    assert await admitted_count(router, 9, 3) == 3


@pytest.mark.parametrize("per_minute", [4, 100])
async def test_routers_share_the_quota_of_a_key(store: Engine, per_minute: int) -> None:
    clock = Clock()
    routers = [clock.router(store, has_peers=True) for _ in range(3)]
    counts = await asyncio.gather(*(admitted_count(router, per_minute, per_minute) for router in routers))
    assert sum(counts) == per_minute
    clock.seconds = 30.0
    assert sum([await admitted_count(router, per_minute, per_minute) for router in routers]) == per_minute // 2


async def test_a_clock_that_is_set_back_locks_no_key_out(store: Engine) -> None:
    clock = Clock()
    clock.seconds = 3600.0
    router = clock.router(store, has_peers=True)
    assert await admitted_count(router, 9, 6) == 6
    clock.seconds = 10.0
    later = clock.router(store, has_peers=True)
    assert await admitted_count(later, 9, 6) == 0
    clock.seconds = 40.0
    assert await admitted_count(later, 9, 6) == 3


async def test_the_first_peer_of_a_router_changes_no_quota(store: Engine) -> None:
    clock = Clock()
    router = clock.router(store, has_peers=False)
    assert await admitted_count(router, 15, 20) == 15
    router.has_peers = lambda: True
    assert await admitted_count(router, 20, 20) == 5
    # Its last peer ends.
    router.has_peers = lambda: False
    assert await admitted_count(router, 20, 20) == 0
    clock.seconds = 30.0
    assert await admitted_count(router, 20, 20) == 10


async def test_without_the_store_each_router_counts_for_itself(store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    router = clock.router(store, has_peers=True)
    assert await admitted_count(router, 20, 20) == 20
    monkeypatch.setattr(quotas, "LIMIT_S", 0.05)
    raw = store.raw_connection()
    raw.execute("BEGIN IMMEDIATE")  # the store hangs: nobody can write
    clock.seconds = 30.0
    assert await admitted_count(router, 40, 20) == 10
    with monkeypatch.context() as patch:
        patch.setattr(quotas, "call_store", None)  # it does not ask the store at every request
        await refusal(router, 20)
    raw.rollback()
    raw.close()
    monkeypatch.setattr(quotas, "LIMIT_S", 60.0)
    clock.seconds = 90.0
    other = clock.router(store, has_peers=True)
    # The call that was given up may have taken a token afterwards.
    assert await admitted_count(router, 20, 20) + await admitted_count(other, 20, 20) in (19, 20)
