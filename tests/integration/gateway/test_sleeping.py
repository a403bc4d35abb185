"""An engine sleeps while a training holds its device, and serves again afterwards."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx

from store.database import write_session
from store.repositories.leases import acquire, release
from tests.integration.gateway.place import V1, Place, place, until, until_offered
from traced.config.settings import load_settings
from traced.gateway.server import open_gateway

SLEEP: dict[str, Any] = {"serving.sleep_for_training": True, "serving.devices": ["gpu-1"]}


def hold(made: Place, device: str, purpose: str, seconds: float = 3600) -> None:
    with write_session(made.store) as opened:
        assert acquire(opened, device, purpose, purpose, "c1", at=datetime.now(UTC), ttl=timedelta(seconds=seconds))


def give_back(made: Place, device: str, purpose: str) -> None:
    with write_session(made.store) as opened:
        assert release(opened, device, purpose)


async def engines(made: Place) -> list[str]:
    return list((await made.http.get("/ready")).json()["engines"].values())


async def until_said(made: Place, what: str) -> None:
    for _ in range(500):
        if what in (said := (await engines(made))[0]):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(said)


@asynccontextmanager
async def another(made: Place, folder: Path, **more: Any) -> AsyncIterator[Place]:
    """One more router over the same engines and store."""
    given = {"serving.port": 0, "serving.engine": "external", "routing.router": "labels", **more}
    read = load_settings(folder, given)
    async with (
        open_gateway(read, made.store, [one.url for one in made.engines]) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http,
    ):
        yield replace(made, url=url, http=http, settings=read)


async def until_answered(made: Place, status: int, model: str = "base") -> Any:
    for _ in range(500):
        answer = await made.ask(model)
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError(answer.text)


def test_it_sleeps_when_its_requests_have_ended_and_wakes_with_its_adapters(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, live=V1, settings=SLEEP) as made:
            await until_offered(made, V1)
            hold(made, "gpu-2", "train else")
            hold(made, "gpu-1", "evaluate")
            made.engine.delay_s = 1.5
            long = asyncio.create_task(made.ask(V1))
            await until(lambda: made.engine.running)
            give_back(made, "gpu-1", "evaluate")
            hold(made, "gpu-1", "train date-reasoning")
            refused = await until_answered(made, 503)
            assert int(refused.headers["Retry-After"]) > 0
            assert not made.engine.asleep
            assert (await long).status_code == 200
            await until(lambda: made.engine.asleep)
            assert await engines(made) == ["asleep: gpu-1 is held to train date-reasoning"]
            made.engine.delay_s = 0.0
            made.promote("date-reasoning@v2")  # nothing is loaded into a sleeping engine
            give_back(made, "gpu-1", "train date-reasoning")
            assert (await until_answered(made, 200)).status_code == 200
            await until_offered(made, "date-reasoning@v2")
            assert await engines(made) == ["ok"]
            assert made.engine.sleeps == [0]

    asyncio.run(check())


def test_a_lapsed_lease_keeps_nobody_asleep(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, settings=SLEEP | {"serving.devices": []}) as made:
            hold(made, "gpu-7", "train date-reasoning", seconds=1.5)
            await until(lambda: made.engine.asleep)
            await until_answered(made, 200)

    asyncio.run(check())


def test_an_engine_that_cannot_sleep_takes_no_requests_all_the_same(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, settings=SLEEP) as made:
            made.engine.refuses_sleep = True
            hold(made, "gpu-1", "train date-reasoning")
            await until_answered(made, 503)
            await until_said(made, "no sleep mode")
            give_back(made, "gpu-1", "train date-reasoning")
            assert (await until_answered(made, 200)).json()

    asyncio.run(check())


def test_one_that_failed_in_its_sleep_is_woken_before_it_takes_requests(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, live=V1, settings=SLEEP) as made:
            await until_offered(made, V1)
            hold(made, "gpu-1", "train date-reasoning")
            await until_said(made, "asleep: ")
            made.engine.ill = True
            await until_said(made, "/health")
            give_back(made, "gpu-1", "train date-reasoning")
            made.engine.ill = False
            await until_offered(made, V1)
            assert (await made.ask(V1)).status_code == 200
            assert (made.engine.sleeps, made.engine.wakes) == ([0], 1)

    asyncio.run(check())


def test_one_that_was_started_anew_in_its_sleep_sleeps_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, settings=SLEEP) as made:
            hold(made, "gpu-1", "train date-reasoning")
            await until_said(made, "asleep: ")
            await made.engine.stop()
            await until_said(made, "/health")
            made.engine.asleep = False
            await made.engine.again()
            await until_said(made, "asleep: ")
            assert (made.engine.asleep, made.engine.wakes) == (True, 0)

    asyncio.run(check())


def test_a_new_router_wakes_an_engine_that_sleeps_when_no_training_runs_any_more(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path) as made:
            hold(made, "gpu-1", "train date-reasoning")
            made.engine.asleep = True
            async with another(made, tmp_path / "plain") as plain:  # wakes nobody, and sends it nothing
                assert (await plain.ask("base")).status_code == 503
                assert "serving.sleep_for_training" in (await engines(plain))[0]
                async with another(made, tmp_path / "new", **SLEEP) as new:
                    await until_said(new, "asleep: gpu-1 is held to train")
                    assert made.engine.wakes == 0
                    give_back(made, "gpu-1", "train date-reasoning")
                    assert (await until_answered(new, 200)).json()
                    assert made.engine.wakes == 1
                await until_answered(plain, 200)

    asyncio.run(check())
