"""The service runs no cycle before the router has the vLLM that stages use as well."""

import asyncio
import json
import logging
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from traced.app import service
from traced.app.service import router_engine
from traced.config.settings import Settings, load_settings
from traced.core.files import publish_file
from traced.core.ownership import own_identity
from traced.inference.model_files import BUNDLED
from traced.inference.shared_engine import EngineRecord, record_file, start_lock

START_S = 5.0


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ENGINE_POLL_S", 0.01)


def vllm(tmp_path: Path, **values: object) -> Settings:
    defaults = {"engine.backend": "vllm", "serving.with_service": True, "engine.start_timeout_s": START_S}
    return load_settings(tmp_path, {**defaults, **values})


def record(tmp_path: Path, model: Path = BUNDLED) -> None:
    engine = EngineRecord("http://127.0.0.1:9", 7, own_identity(), str(model), 10, 16)
    publish_file(record_file(tmp_path, model), json.dumps(asdict(engine)))


async def wait(settings: Settings, draining: asyncio.Event | None = None) -> tuple[float, int]:
    """Return the seconds of the wait, and the calls of ``beat`` during it."""
    beats: list[float] = []
    started = time.monotonic()
    await router_engine(settings, draining or asyncio.Event(), lambda: beats.append(time.monotonic()))
    return time.monotonic() - started, len(beats)


async def test_it_waits_until_the_engine_is_recorded_and_pings_the_watchdog(tmp_path: Path) -> None:
    waiting = asyncio.create_task(wait(vllm(tmp_path)))
    record(tmp_path, tmp_path)  # the engine of another model
    await asyncio.sleep(0.1)
    assert not waiting.done()
    record(tmp_path)
    seconds, beats = await waiting
    assert seconds < START_S
    assert beats > 1


async def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    draining = asyncio.Event()
    waiting = asyncio.create_task(wait(vllm(tmp_path), draining))
    await asyncio.sleep(0.05)
    draining.set()
    assert (await waiting)[0] < START_S


async def test_a_router_without_an_engine_delays_cycles_only_for_the_time_of_a_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert (await wait(vllm(tmp_path, **{"engine.start_timeout_s": 0.05})))[0] < START_S
    assert "stages start their own" in caplog.text


async def test_an_engine_whose_starts_fail_delays_no_cycle_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(wait(vllm(tmp_path)))
    for _ in range(2):
        assert not waiting.done()
        with start_lock(tmp_path):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
    assert (await waiting)[0] < START_S
    assert "stages start their own" in caplog.text


async def test_a_long_start_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start_lock(tmp_path):
        waiting = asyncio.create_task(wait(vllm(tmp_path, **{"engine.start_timeout_s": 0.05})))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        record(tmp_path)
        await waiting
    assert caplog.text == ""


@pytest.mark.parametrize(
    "values",
    [
        {"serving.with_service": False},
        {"engine.backend": "embedded"},
        {"engine.urls": ["http://127.0.0.1:9"]},
    ],
)
async def test_it_does_not_wait_for_a_router_that_starts_no_vllm(tmp_path: Path, values: dict[str, object]) -> None:
    assert (await wait(vllm(tmp_path, **values)))[1] == 0
