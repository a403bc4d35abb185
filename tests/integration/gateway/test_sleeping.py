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
from tests.integration.gateway.place import V1, RunningGateway, running_gateway, until_offered
from tests.waiting import eventually_async
from traced.config.settings import load_settings
from traced.gateway.server import open_gateway

SLEEP: dict[str, Any] = {"serving.sleep_for_training": True, "serving.devices": ["gpu-1"]}


def hold(gateway: RunningGateway, device: str, purpose: str, seconds: float = 3600) -> None:
    with write_session(gateway.store) as session:
        assert acquire(session, device, purpose, purpose, "c1", at=datetime.now(UTC), ttl=timedelta(seconds=seconds))


def give_back(gateway: RunningGateway, device: str, purpose: str) -> None:
    with write_session(gateway.store) as session:
        assert release(session, device, purpose)


async def engines(gateway: RunningGateway) -> list[str]:
    return list((await gateway.http.get("/ready")).json()["engines"].values())


async def wait_until_status(gateway: RunningGateway, expected: str) -> None:
    for _ in range(500):
        if expected in (status := (await engines(gateway))[0]):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(status)


@asynccontextmanager
async def second_gateway(gateway: RunningGateway, folder: Path, **overrides: Any) -> AsyncIterator[RunningGateway]:
    """One more router over the same engines and store."""
    setting_values = {"serving.port": 0, "routing.router": "labels", **overrides}
    settings = load_settings(folder, setting_values)
    async with (
        open_gateway(settings, gateway.store, [engine.url for engine in gateway.engines]) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http,
    ):
        yield replace(gateway, url=url, http=http, settings=settings)


async def until_answered(gateway: RunningGateway, status: int, model: str = "base") -> Any:
    for _ in range(500):
        answer = await gateway.ask(model)
        if answer.status_code == status:
            return answer
        await asyncio.sleep(0.02)
    raise AssertionError(answer.text)


async def test_it_sleeps_when_its_requests_have_ended_and_wakes_with_its_adapters(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1, settings=SLEEP) as gateway:
        await until_offered(gateway, V1)
        hold(gateway, "gpu-2", "train else")
        hold(gateway, "gpu-1", "evaluate")
        gateway.engine.delay_s = 1.5
        long = asyncio.create_task(gateway.ask(V1))
        await eventually_async(lambda: gateway.engine.running)
        give_back(gateway, "gpu-1", "evaluate")
        hold(gateway, "gpu-1", "train date-reasoning")
        response = await until_answered(gateway, 503)
        assert int(response.headers["Retry-After"]) > 0
        assert not gateway.engine.asleep
        assert (await long).status_code == 200
        await eventually_async(lambda: gateway.engine.asleep)
        assert await engines(gateway) == ["asleep: gpu-1 is leased for train date-reasoning"]
        gateway.engine.delay_s = 0.0
        gateway.promote("date-reasoning@v2")  # nothing is loaded into a sleeping engine
        give_back(gateway, "gpu-1", "train date-reasoning")
        assert (await until_answered(gateway, 200)).status_code == 200
        await until_offered(gateway, "date-reasoning@v2")
        assert await engines(gateway) == ["ok"]
        assert gateway.engine.sleeps == [0]


async def test_a_lapsed_lease_does_not_keep_engines_asleep(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP | {"serving.devices": []}) as gateway:
        hold(gateway, "gpu-7", "train date-reasoning", seconds=1.5)
        await eventually_async(lambda: gateway.engine.asleep)
        await until_answered(gateway, 200)


async def test_an_engine_that_cannot_sleep_takes_no_requests_all_the_same(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP) as gateway:
        gateway.engine.refuses_sleep = True
        hold(gateway, "gpu-1", "train date-reasoning")
        await until_answered(gateway, 503)
        await wait_until_status(gateway, "no sleep mode")
        give_back(gateway, "gpu-1", "train date-reasoning")
        assert (await until_answered(gateway, 200)).json()


async def test_an_engine_that_failed_asleep_is_woken_before_it_takes_requests(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1, settings=SLEEP) as gateway:
        await until_offered(gateway, V1)
        hold(gateway, "gpu-1", "train date-reasoning")
        await wait_until_status(gateway, "asleep: ")
        gateway.engine.ill = True
        await wait_until_status(gateway, "/health")
        give_back(gateway, "gpu-1", "train date-reasoning")
        gateway.engine.ill = False
        await until_offered(gateway, V1)
        assert (await gateway.ask(V1)).status_code == 200
        assert (gateway.engine.sleeps, gateway.engine.wakes) == ([0], 1)


async def test_an_engine_restarted_during_a_training_sleeps_again(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP) as gateway:
        hold(gateway, "gpu-1", "train date-reasoning")
        await wait_until_status(gateway, "asleep: ")
        await gateway.engine.stop()
        await wait_until_status(gateway, "/health")
        gateway.engine.asleep = False
        await gateway.engine.reset()
        await wait_until_status(gateway, "asleep: ")
        assert (gateway.engine.asleep, gateway.engine.wakes) == (True, 0)


async def test_a_new_router_wakes_an_engine_that_sleeps_when_no_training_runs_any_more(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        hold(gateway, "gpu-1", "train date-reasoning")
        gateway.engine.asleep = True
        async with second_gateway(gateway, tmp_path / "plain") as second:  # wakes nobody, and sends it nothing
            assert (await second.ask("base")).status_code == 503
            assert "serving.sleep_for_training" in (await engines(second))[0]
            async with second_gateway(gateway, tmp_path / "new", **SLEEP) as new:
                await wait_until_status(new, "asleep: gpu-1 is leased for train")
                assert gateway.engine.wakes == 0
                give_back(gateway, "gpu-1", "train date-reasoning")
                assert (await until_answered(new, 200)).json()
                assert gateway.engine.wakes == 1
            await until_answered(second, 200)
