"""A training gives its device back while the router has much to do."""

import asyncio
from datetime import timedelta
from pathlib import Path

from store.database import read_session, write_session
from store.repositories.leases import Lease, acquire, list_leases
from tests.integration.gateway.place import RunningGateway, running_gateway
from tests.unit.store.chain import T0
from tests.waiting import eventually_async
from traced.gateway.device_sharing import Preemption

LOAD = {"serving.busy_requests": 4, "serving.busy_s": 0.6}


def hold(gateway: RunningGateway, device: str) -> None:
    with write_session(gateway.store) as session:
        assert acquire(session, device, f"trainer/{device}", "train", "c1", at=T0, ttl=timedelta(hours=1))


def requested_devices(gateway: RunningGateway) -> dict[str, str]:
    with read_session(gateway.store) as session:
        leases: list[Lease] = list_leases(session)
    return {lease.device: lease.wanted_by for lease in leases}


async def test_devices_are_requested_back_under_high_load(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, settings=LOAD | {"serving.devices": ["cpu"]}) as gateway:
        hold(gateway, "cpu")
        hold(gateway, "gpu-1")
        gateway.engine.delay_s = 0.3
        for _ in range(5):  # never four at once
            await asyncio.gather(*(gateway.ask("base") for _ in range(3)))
        assert requested_devices(gateway) == {"cpu": "", "gpu-1": ""}
        gateway.engine.delay_s = 3.0
        request_tasks = [asyncio.create_task(gateway.ask("base")) for _ in range(6)]
        await eventually_async(lambda: requested_devices(gateway)["cpu"])
        assert requested_devices(gateway) == {"cpu": "serving", "gpu-1": ""}
        await asyncio.gather(*request_tasks)


def test_a_short_peak_requests_no_device(tmp_path: Path) -> None:
    clock = [0.0]
    load = [9]
    preemption = Preemption(None, lambda: load[0], lambda: T0, 4, 5.0, clock=lambda: clock[0])  # type: ignore[arg-type]
    assert not preemption.is_overloaded()
    clock[0] = 4.9
    assert not preemption.is_overloaded()
    load[0] = 3
    assert not preemption.is_overloaded()
    load[0] = 9
    clock[0] = 6.0
    assert not preemption.is_overloaded()
    clock[0] = 11.0
    assert preemption.is_overloaded()
