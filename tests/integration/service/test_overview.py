"""What the first screen is told: the router's health, success over time, and what is sampled while somebody watches."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.seeded import seed_store
from store.database import open_store, sqlite_url, write_session
from store.repositories.llm_replies import save_reply
from tests.integration.gateway.place import V1, running_gateway
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import REPLY
from tests.waiting import eventually_async
from traced.api.control import Control
from traced.api.queries import router_health
from traced.client.models import DEVICES, WAITS, CostView, Devices, EventView
from traced.client.transport import RequestRefused
from traced.config.settings import load_settings
from traced.core.liveness import waiting_stages
from traced.daemon.live_state import Beginnings

NOW = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)


@pytest.fixture
def seeded(tmp_path: Path) -> Control:
    store = open_store(sqlite_url(tmp_path / "seeded.db"))
    seed_store(store, tmp_path, NOW)
    settings = load_settings(tmp_path, {"serving.port": 0})
    return Control(settings, store, RecordingLoop(), lambda: NOW, NOW, state="ready")  # type: ignore[arg-type]


async def test_success_over_time_counts_what_was_judged(seeded: Control, path: Path) -> None:
    async with serve_api(seeded, path) as client:
        rates = await client.overview.rates()
        assert [(cycle.cycle_id, cycle.base, cycle.tasks) for cycle in rates.cycles] == [
            ("c-0001", 0.4, 100),
            ("c-0002", pytest.approx(0.47), 100),
        ]
        health = await client.overview.health()
        assert health.router.state == "unknown"
        outcomes = health.traffic.outcomes
        judged_count = sum(day.judged for day in rates.days)
        assert judged_count <= outcomes["success"] + outcomes["failure"] <= judged_count + health.traffic.unsettled
        assert rates.days == sorted(rates.days, key=lambda day: day.day)
        assert rates.days[-1].day <= date(2026, 3, 14)
        assert not rates.partial


async def test_the_status_says_why_a_stage_has_not_begun(seeded: Control, path: Path) -> None:
    async with serve_api(seeded, path) as client:
        assert ((await client.status()).waits, await asyncio.to_thread(waiting_stages, path)) == ({}, {})
        waits = {"train date-reasoning": "cpu: utilisation 90% is over 25%"}
        for stage, reason in waits.items():
            seeded.present.tell(WAITS, stage, NOW, {"for": reason}, "c-0003")
        assert ((await client.status()).waits, await asyncio.to_thread(waiting_stages, path)) == (waits, waits)


async def test_what_a_cycles_stages_have_asked_of_language_models_is_told_with_it(seeded: Control, path: Path) -> None:
    reply = replace(REPLY, cycle_id="c-0003", prompt_tokens=900, completion_tokens=12, cost=0.5, seconds=1.5)
    stages = [("analyze", "", False), ("synthesize", "dates", True), ("synthesize", "names", False)]
    with write_session(seeded.store) as session:
        for number, (stage, capability, is_estimated) in enumerate(stages):
            stage_reply = replace(
                reply, key=f"{number:064}", stage=stage, capability=capability, estimated=is_estimated
            )
            save_reply(session, stage_reply)
    async with serve_api(seeded, path) as client:
        latest_cycle, *older_cycles = (await client.status()).cycles
        assert latest_cycle.costs == [
            CostView(
                stage="analyze",
                calls=1,
                prompt_tokens=900,
                completion_tokens=12,
                cost=0.5,
                seconds=1.5,
                estimated=0,
            ),
            CostView(
                stage="synthesize",
                calls=2,
                prompt_tokens=1800,
                completion_tokens=24,
                cost=1.0,
                seconds=3.0,
                estimated=1,
            ),
        ]
        assert (await client.cycle("c-0003")).costs == latest_cycle.costs
        assert [cycle.costs for cycle in older_cycles] == [[]] * len(older_cycles)


async def test_any_cycle_is_told_by_its_id(seeded: Control, path: Path) -> None:
    async with serve_api(seeded, path) as client:
        cycles = await client.cycles()
        assert [await client.cycle(cycle.id) for cycle in cycles] == cycles
        for unknown in ("c-0009", "c-0001/cancel", "../status"):
            with pytest.raises(RequestRefused, match="there is no cycle") as raised:
                await client.cycle(unknown)
            assert raised.value.status == 404


async def test_devices_are_looked_at_only_while_somebody_watches(seeded: Control, path: Path) -> None:
    call_times: list[datetime] = []

    def look(leases: object, section: object, now: datetime) -> Devices:
        call_times.append(now)
        return Devices(devices=[], leases=[], problems=["none here"])

    seeded = replace(seeded, survey_devices=look)

    async def watch() -> None:
        async with serve_api(seeded, path) as client:
            async with aclosing(client.listen()) as stream:
                await anext(stream)
            assert (call_times, seeded.watch.at_work) == ([], False)
            async with aclosing(client.listen(10**6, present=True)) as stream:
                event = await first(stream, DEVICES)
                assert Devices.model_validate(event.detail).problems == ["none here"]
                assert seeded.watch.at_work
            await eventually_async(lambda: not seeded.watch.at_work)
            assert seeded.present.of(DEVICES) == []

    await asyncio.wait_for(watch(), 20)
    assert call_times


async def first(stream: object, kind: str) -> EventView:
    async for event in stream:  # type: ignore[attr-defined]
        if event.kind == kind:
            return event
    raise AssertionError("the stream has ended")


def test_a_phase_is_known_by_when_it_was_first_heard_of() -> None:
    beginnings, later = Beginnings(), NOW + timedelta(minutes=2)
    start_fields = {"since": NOW.isoformat(), "done_then": 3}
    assert beginnings.with_start("train x", NOW, {"phase": "a", "done": 3}) == {"phase": "a", "done": 3, **start_fields}
    assert beginnings.with_start("train x", later, {"phase": "a", "done": 9})["since"] == NOW.isoformat()
    assert beginnings.with_start("train x", later, {"phase": "b", "done": 0})["since"] == later.isoformat()
    assert beginnings.with_start("train x", later, {"phase": "a", "done": 1})["done_then"] == 1  # restarted
    beginnings.forget("train x")
    assert beginnings.with_start("train x", later, {"phase": "b", "done": 5})["done_then"] == 5
    beginnings.forget()
    assert beginnings.with_start("train x", NOW, {"phase": "b", "done": 6})["since"] == NOW.isoformat()


async def test_a_router_that_nobody_runs_is_away_and_one_that_runs_tells_of_its_engines(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as running:
        port = int(running.url.rpartition(":")[2])
        section = running.settings.serving.model_copy(update={"port": port, "host": "0.0.0.0"})
        health = await asyncio.to_thread(router_health, section)
        assert (health.state, health.trouble) == ("ready", "")
        assert list(health.engines.values()) == ["ok"]
        running.engine.refuses_loads = True
        running.promote(V1)
        await eventually_async(lambda: V1 in running.engine.refusals)
        health = await asyncio.to_thread(router_health, section)
        assert f"{V1}: HTTP 500" in health.trouble
        assert "routing by labels: no engine has loaded a live adapter" in health.trouble
    health_after_stop = await asyncio.to_thread(router_health, section)
    assert (health_after_stop.state, health_after_stop.engines) == ("away", {})
    assert health_after_stop.trouble
