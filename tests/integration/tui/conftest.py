"""The app over the real control API of a seeded store, on a real socket."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine
from textual.pilot import Pilot

from benchmarks.seeded import Seeded
from store.database import open_store, sqlite_url
from store.repositories.leases import Lease
from tests.integration.conftest import SEEDED_AT
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from tests.integration.tui.screens import until
from traced.api.control import Control
from traced.api.episodes import Episodes
from traced.client import Client
from traced.client.models import Devices, DeviceView, LeaseView
from traced.config.service_sections import DevicesSection
from traced.config.settings import load_settings
from traced.daemon.live_state import LiveState
from tui.app import TracedApp
from tui.connection import Address

AT = SEEDED_AT


def two_devices(leases: Sequence[Lease], section: DevicesSection, now: datetime) -> Devices:
    """A GPU and the processors, which do the same on every machine that the tests run on."""
    held = {lease.device: LeaseView(**vars(lease)) for lease in leases}
    common = {"foreign": [], "mig": "none"}
    gpu = {"id": "GPU-5f2c9a1e", "kind": "cuda", "name": "NVIDIA L4", "memory_total": 24 * 2**30, **common}
    cpu = {"id": "cpu", "kind": "cpu", "name": "x86_64, 8 cores", "memory_total": 32 * 2**30, **common}
    busy = {"memory_used": 17 * 2**30, "utilisation": 0.86, "idle": False, "why_not": ["utilisation 86 % is over 25 %"]}
    rest = {"memory_used": 6 * 2**30, "utilisation": 0.12, "idle": True, "why_not": []}
    seen: list[dict[str, Any]] = [
        gpu | busy | {"lease": held.get("GPU-5f2c9a1e")},
        cpu | rest | {"lease": held.get("cpu")},
    ]
    return Devices(devices=[DeviceView(**one) for one in seen], leases=list(held.values()), problems=[])


@dataclass
class Running:
    """The app on a screen of some size, a client of the same daemon, and what is in its store."""

    app: TracedApp
    pilot: Pilot[None]
    client: Client
    control: Control
    seeded: Seeded


class Opened(Protocol):
    """Opens the app."""

    def __call__(
        self, size: tuple[int, int] = (120, 40), *, read_only: bool = False
    ) -> AbstractAsyncContextManager[Running]:
        """On a screen of ``size``."""


@pytest.fixture
def store(seeded_store: Engine) -> Engine:
    return seeded_store


@pytest.fixture
def control(tmp_path: Path, store: Engine) -> Control:
    """The daemon's acts, with a loop that does no work and a clock that tells minutes."""
    times = iter(AT + timedelta(minutes=minute) for minute in range(100_000))
    settings = load_settings(tmp_path, {"serving.port": 0})
    return Control(settings, store, WrittenDown(), lambda: next(times), AT, state="ready", survey_devices=two_devices)  # type: ignore[arg-type]


@asynccontextmanager
async def _none_is_played_after(control: Control) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await control.playing.close()
        control.playing = Episodes()


@pytest.fixture
def opened(tmp_path: Path, control: Control, seeded_file: tuple[Path, Seeded]) -> Opened:
    """Opens the app, as often as a test wants."""
    return _opening(tmp_path / "traced.sock", control, seeded_file[1])


@pytest.fixture
def empty(tmp_path: Path, control: Control) -> Iterator[Opened]:
    """Opens the app over a store in which nothing has happened yet."""
    store = open_store(sqlite_url(tmp_path / "empty.db"))
    nothing = Seeded([], "", "", "", "", {}, 0)
    yield _opening(tmp_path / "traced.sock", replace(control, store=store, present=LiveState()), nothing)
    store.dispose()


def _opening(path: Path, control: Control, seeded: Seeded) -> Opened:
    @asynccontextmanager
    async def opening(size: tuple[int, int] = (120, 40), *, read_only: bool = False) -> AsyncIterator[Running]:
        async with served(control, path) as client, _none_is_played_after(control):
            app = TracedApp(Address(path, read_only=read_only))
            app.animation_level = "none"  # a picture is of the end of a movement
            async with app.run_test(size=size, notifications=True) as pilot:
                await until(pilot, lambda: app.linked and app.status is not None)
                yield Running(app, pilot, client, control, seeded)

    return opening
