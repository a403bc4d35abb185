"""An engine sleeps during the updates of a training, and is awake before its requests wait for too long."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import read_session, write_session
from store.repositories.leases import acquire, list_leases, release
from tests.integration.gateway.place import V1, RunningGateway, running_gateway, until_offered
from tests.integration.gateway.upstream import upstreams
from tests.waiting import eventually_async
from traced.config.settings import load_settings
from traced.gateway.server import open_gateway
from traced.inference.client import EngineClient
from traced.inference.engine_sleep import EngineSleep
from traced.inference.errors import EngineError

TRAINING = "train date-reasoning"
SLEEP: dict[str, Any] = {"serving.sleep_for_training": True, "serving.devices": ["gpu-1"], "serving.busy_s": 2.0}
PATIENT: dict[str, Any] = SLEEP | {"serving.busy_s": 1000.0}


def hold(gateway: RunningGateway, device: str, purpose: str, seconds: float = 3600) -> None:
    with write_session(gateway.store) as session:
        assert acquire(session, device, purpose, purpose, "c1", at=datetime.now(UTC), ttl=timedelta(seconds=seconds))


def give_back(gateway: RunningGateway, device: str, purpose: str) -> None:
    with write_session(gateway.store) as session:
        assert release(session, device, purpose)


def requester(gateway: RunningGateway) -> str:
    """Who has requested the leased device back."""
    with read_session(gateway.store) as session:
        return list_leases(session)[0].wanted_by


async def engines(gateway: RunningGateway) -> list[str]:
    return list((await gateway.http.get("/ready")).json()["engines"].values())


async def wait_until_status(gateway: RunningGateway, expected: str) -> None:
    for _ in range(500):
        if expected in (status := (await engines(gateway))[0]):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(status)


@asynccontextmanager
async def trainer(gateway: RunningGateway) -> AsyncIterator[EngineSleep]:
    """The trainer's side: a live lease, and the sleep of the engine."""
    hold(gateway, "gpu-1", TRAINING)
    async with EngineClient(gateway.engine.url) as client:
        yield EngineSleep([client], timeout_s=5)


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


async def test_it_serves_during_rollouts_and_refuses_requests_during_the_update(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1, settings=PATIENT) as gateway, trainer(gateway) as sleep:
        await until_offered(gateway, V1)
        assert (await gateway.ask(V1)).status_code == 200  # the lease alone lets no engine sleep
        await sleep.begin_update()
        await wait_until_status(gateway, "asleep: ")
        response = await gateway.ask(V1)
        assert response.status_code == 503
        assert int(response.headers["Retry-After"]) > 0
        assert await engines(gateway) == [f"asleep: gpu-1 is leased for {TRAINING}"]
        gateway.promote("date-reasoning@v2")  # nothing is loaded into a sleeping engine
        assert gateway.engine.loads == [V1]
        await sleep.end_update()
        assert (await until_answered(gateway, 200)).status_code == 200
        await until_offered(gateway, "date-reasoning@v2")
        assert (gateway.engine.sleeps, gateway.engine.wakes) == ([0], 1)


async def test_requests_that_run_are_completed_before_it_sleeps_and_it_is_not_woken_meanwhile(tmp_path: Path) -> None:
    settings = SLEEP | {"serving.busy_s": 0.0}  # which wakes it at once
    async with running_gateway(tmp_path, settings=settings) as gateway, trainer(gateway) as sleep:
        gateway.engine.delay_s = 2.0
        running = asyncio.create_task(gateway.ask("base"))
        await eventually_async(lambda: gateway.engine.decoding)
        update = asyncio.create_task(sleep.begin_update())
        await wait_until_status(gateway, "asleep: ")
        assert (await gateway.ask("base")).status_code == 503
        assert (await running).status_code == 200
        await update
        gateway.engine.delay_s = 0.0
        assert (await until_answered(gateway, 200)).json()
        assert (gateway.engine.sleeps, gateway.engine.faults) == ([0], 0)


async def test_it_is_woken_before_requests_wait_longer_than_busy_s(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP) as gateway, trainer(gateway) as sleep:
        await sleep.begin_update()
        await wait_until_status(gateway, "asleep: ")
        await asyncio.to_thread(time.sleep, 2.5)  # without requests it goes on sleeping
        assert gateway.engine.wakes == 0
        first = time.monotonic()
        assert (await gateway.ask("base")).status_code == 503
        await eventually_async(lambda: gateway.engine.wakes)
        # busy_s is 2; a busy machine notices a little later.
        assert 1.0 < time.monotonic() - first <= 4.0
        assert (await until_answered(gateway, 200)).json()
        await sleep.end_update()  # which finds it awake
        assert gateway.engine.wakes == 1


async def test_the_time_that_waking_took_counts_as_waiting(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP) as gateway, trainer(gateway) as sleep:
        gateway.engine.wake_delay_s = 1.5
        waits = []
        for wakes in (1, 2):
            await sleep.begin_update()
            await wait_until_status(gateway, "asleep: ")
            first = time.monotonic()
            assert (await gateway.ask("base")).status_code == 503
            await eventually_async(lambda: gateway.engine.wakes == wakes)  # noqa: B023
            waits.append(time.monotonic() - first)
            await until_answered(gateway, 200)
        # busy_s is 2. The first time the router does not know yet how long it takes.
        assert waits[0] > 2.5
        assert waits[1] < waits[0] - 0.7


async def test_a_request_that_came_before_the_sleep_was_noticed_waits_no_longer(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=SLEEP) as gateway, trainer(gateway):
        await until_answered(gateway, 200)
        gateway.engine.fall_asleep()
        async with asyncio.timeout(4):
            assert (await gateway.ask("base")).status_code in {200, 503}
            await eventually_async(lambda: gateway.engine.wakes)


async def test_an_engine_without_memory_to_wake_up_has_its_device_requested_back(tmp_path: Path) -> None:
    settings = SLEEP | {"serving.busy_s": 0.0}
    async with running_gateway(tmp_path, settings=settings) as gateway, trainer(gateway) as sleep:
        await sleep.begin_update()
        gateway.engine.refuses_wake = True
        await wait_until_status(gateway, "asleep: ")
        await gateway.ask("base")
        await eventually_async(lambda: requester(gateway) == "serving")
        await wait_until_status(gateway, "CUDA out of memory")
        gateway.engine.refuses_wake = False
        assert (await until_answered(gateway, 200)).json()


async def test_a_training_that_was_killed_leaves_no_engine_asleep(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=PATIENT) as gateway:
        hold(gateway, "gpu-1", TRAINING, seconds=1.5)
        gateway.engine.fall_asleep()
        await wait_until_status(gateway, "asleep: gpu-1")
        await until_answered(gateway, 200)


async def test_leases_of_other_devices_and_purposes_let_no_engine_sleep(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=PATIENT) as gateway:
        hold(gateway, "gpu-2", "train else")
        hold(gateway, "gpu-1", "evaluate")
        gateway.engine.fall_asleep()
        await eventually_async(lambda: gateway.engine.wakes)
        give_back(gateway, "gpu-1", "evaluate")


async def test_an_engine_that_fails_asleep_is_woken_before_it_takes_requests(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, live=V1, settings=PATIENT) as gateway, trainer(gateway) as sleep:
        await until_offered(gateway, V1)
        await sleep.begin_update()
        await wait_until_status(gateway, "asleep: ")
        gateway.engine.ill = True
        await wait_until_status(gateway, "/health")
        give_back(gateway, "gpu-1", TRAINING)
        gateway.engine.ill = False
        await until_offered(gateway, V1)
        assert (await gateway.ask(V1)).status_code == 200
        assert gateway.engine.wakes == 1


async def test_a_router_without_the_setting_wakes_nobody(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway:
        hold(gateway, "gpu-1", TRAINING)
        gateway.engine.fall_asleep()
        async with second_gateway(gateway, tmp_path / "plain") as second:  # sends it nothing either
            assert (await second.ask("base")).status_code == 503
            assert "serving.sleep_for_training" in (await engines(second))[0]
            async with second_gateway(gateway, tmp_path / "new", **PATIENT) as new:
                await wait_until_status(new, "asleep: gpu-1 is leased for train")
                assert gateway.engine.wakes == 0
                give_back(gateway, "gpu-1", TRAINING)
                assert (await until_answered(new, 200)).json()
                assert gateway.engine.wakes == 1
            await until_answered(second, 200)


async def test_an_engine_that_cannot_sleep_shares_the_gpu(caplog: pytest.LogCaptureFixture) -> None:
    async with upstreams() as [engine], EngineClient(engine.url) as client:
        engine.refuses_sleep = True
        sleep = EngineSleep([client], timeout_s=5)
        for _ in range(2):
            await sleep.begin_update()
            await sleep.end_update()
        assert caplog.text.count("does not sleep, the update shares the GPU") == 1
        assert engine.wakes == 0


async def test_an_engine_that_does_not_wake_up_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traced.inference.engine_sleep.POLL_S", 0.01)
    async with upstreams() as [engine], EngineClient(engine.url) as client:
        sleep = EngineSleep([client], timeout_s=0.1)
        await sleep.begin_update()
        engine.refuses_wake = True
        with pytest.raises(EngineError, match=r"could not be woken up for 0.1 s: .*CUDA out of memory"):
            await sleep.end_update()


async def test_where_training_and_engine_take_turns_the_device_is_requested_back_and_the_engine_is_woken_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.gateway.server.gpu_ids", lambda: ["gpu-1"])
    settings = SLEEP | {"serving.busy_s": 0.0, "devices.train_on": "gpu-1", "engine.backend": "vllm"}
    async with running_gateway(tmp_path, settings=settings) as gateway, trainer(gateway) as sleep:
        await sleep.begin_update()
        await wait_until_status(gateway, "asleep: ")
        await gateway.ask("base")
        await eventually_async(lambda: requester(gateway) == "serving")
        await wait_until_status(gateway, f"asleep: gpu-1 is leased for {TRAINING}, which is requested back")
        await asyncio.to_thread(time.sleep, 1.5)
        assert gateway.engine.wakes == 0
        give_back(gateway, "gpu-1", TRAINING)
        assert (await until_answered(gateway, 200)).json()
        assert gateway.engine.wakes == 1


@pytest.mark.parametrize("failures", [2, 10**6])
async def test_an_engine_that_is_being_restarted_is_put_to_sleep_once_it_answers(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.inference.engine_sleep.POLL_S", 0.01)
    async with upstreams() as [engine], EngineClient(engine.url) as client:
        put_to_sleep, attempts = client.sleep, 0

        async def fail_at_first() -> None:
            nonlocal attempts
            attempts += 1
            if attempts <= failures:
                raise EngineError("no answer")
            await put_to_sleep()

        monkeypatch.setattr(client, "sleep", fail_at_first)
        engine.ill = failures > 2
        sleep = EngineSleep([client], timeout_s=1 if failures == 2 else 0.1)
        if failures == 2:
            await sleep.begin_update()
            assert await client.is_sleeping()
        else:
            with pytest.raises(EngineError, match=r"could not be put to sleep for 0.1 s: no answer"):
                await sleep.begin_update()
