"""A training gives its device back while the router has much to do."""

import asyncio
from datetime import timedelta
from pathlib import Path

from store.database import read_session, write_session
from store.repositories.leases import Lease, acquire, list_leases
from tests.integration.gateway.place import Place, place, until
from tests.unit.store.chain import T0
from traced.gateway.device_sharing import Preemption

LOAD = {"serving.busy_requests": 4, "serving.busy_s": 0.6}


def hold(made: Place, device: str) -> None:
    with write_session(made.store) as opened:
        assert acquire(opened, device, f"trainer/{device}", "train", "c1", at=T0, ttl=timedelta(hours=1))


def wanted(made: Place) -> dict[str, str]:
    with read_session(made.store) as opened:
        leases: list[Lease] = list_leases(opened)
    return {lease.device: lease.wanted_by for lease in leases}


def test_devices_are_asked_back_while_requests_are_many(tmp_path: Path) -> None:
    async def check() -> None:
        async with place(tmp_path, settings=LOAD | {"serving.devices": ["cpu"]}) as made:
            hold(made, "cpu")
            hold(made, "gpu-1")
            made.engine.delay_s = 0.3
            for _ in range(5):  # never four at once
                await asyncio.gather(*(made.ask("base") for _ in range(3)))
            assert wanted(made) == {"cpu": "", "gpu-1": ""}
            made.engine.delay_s = 3.0
            many = [asyncio.create_task(made.ask("base")) for _ in range(6)]
            await until(lambda: wanted(made)["cpu"])
            assert wanted(made) == {"cpu": "serving", "gpu-1": ""}
            await asyncio.gather(*many)

    asyncio.run(check())


def test_a_short_peak_asks_for_nothing(tmp_path: Path) -> None:
    clock = [0.0]
    load = [9]
    yielding = Preemption(None, lambda: load[0], lambda: T0, 4, 5.0, clock=lambda: clock[0])  # type: ignore[arg-type]
    assert not yielding.is_overloaded()
    clock[0] = 4.9
    assert not yielding.is_overloaded()
    load[0] = 3
    assert not yielding.is_overloaded()
    load[0] = 9
    clock[0] = 6.0
    assert not yielding.is_overloaded()
    clock[0] = 11.0
    assert yielding.is_overloaded()
