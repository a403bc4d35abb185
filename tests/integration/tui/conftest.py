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
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.integration.tui.screens import wait_until
from traced.api.control import Control
from traced.api.episodes import Episodes
from traced.client import Client
from traced.client.models import Devices, DeviceView, LeaseView
from traced.config.settings import Settings, load_settings
from traced.daemon.live_state import LiveState
from tui.app import TracedApp
from tui.connection import Address

NOW = SEEDED_AT


def two_devices(leases: Sequence[Lease], settings: Settings, now: datetime) -> Devices:
    """Return a fixed survey of one GPU and the CPU, the same on every test machine."""
    lease_views = {lease.device: LeaseView(**vars(lease)) for lease in leases}
    common = {"foreign": [], "mig": "none"}
    gpu = {"id": "GPU-5f2c9a1e", "kind": "cuda", "name": "NVIDIA L4", "memory_total": 24 * 2**30, **common}
    cpu = {"id": "cpu", "kind": "cpu", "name": "x86_64, 8 cores", "memory_total": 32 * 2**30, **common}
    busy = {"memory_used": 17 * 2**30, "utilisation": 0.86, "idle": False, "why_not": ["utilisation 86 % is over 25 %"]}
    rest = {"memory_used": 6 * 2**30, "utilisation": 0.12, "idle": True, "why_not": []}
    devices: list[dict[str, Any]] = [
        gpu | busy | {"lease": lease_views.get("GPU-5f2c9a1e")},
        cpu | rest | {"lease": lease_views.get("cpu")},
    ]
    return Devices(devices=[DeviceView(**device) for device in devices], leases=list(lease_views.values()), problems=[])


@dataclass
class RunningApp:
    """The running app with its pilot, a client of the same daemon, and the seeded contents of its store.

    ``notices`` has the texts of all notifications; on a busy machine one may have gone before anybody looks.
    """

    app: TracedApp
    pilot: Pilot[None]
    client: Client
    control: Control
    seeded: Seeded
    notices: list[str]


class OpenApp(Protocol):
    """A function that runs the app in a context."""

    def __call__(
        self, size: tuple[int, int] = (120, 40), *, read_only: bool = False
    ) -> AbstractAsyncContextManager[RunningApp]:
        """Run the app in a terminal of ``size`` (columns, rows)."""


@pytest.fixture
def store(seeded_store: Engine) -> Engine:
    return seeded_store


@pytest.fixture
def control(tmp_path: Path, store: Engine) -> Control:
    """Return the control of a daemon whose loop does no work and whose clock advances a minute per reading."""
    times = iter(NOW + timedelta(minutes=minute) for minute in range(100_000))
    settings = load_settings(tmp_path, {"serving.port": 0})
    loop: Any = RecordingLoop()
    return Control(settings, store, loop, lambda: next(times), NOW, state="ready", survey_devices=two_devices)


@asynccontextmanager
async def _close_episodes_at_exit(control: Control) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await control.playing.close()
        control.playing = Episodes()


@pytest.fixture
def open_app(tmp_path: Path, control: Control, seeded_file: tuple[Path, Seeded]) -> OpenApp:
    """Return a function that runs the app over the seeded store; a test may call it repeatedly."""
    return _opener(tmp_path / "traced.sock", control, seeded_file[1])


@pytest.fixture
def open_empty_app(tmp_path: Path, control: Control) -> Iterator[OpenApp]:
    """Return a function that runs the app over an empty store."""
    store = open_store(sqlite_url(tmp_path / "empty.db"))
    nothing = Seeded([], "", "", "", "", {}, 0)
    yield _opener(tmp_path / "traced.sock", replace(control, store=store, present=LiveState()), nothing)
    store.dispose()


def _opener(path: Path, control: Control, seeded: Seeded) -> OpenApp:
    @asynccontextmanager
    async def run_app(size: tuple[int, int] = (120, 40), *, read_only: bool = False) -> AsyncIterator[RunningApp]:
        async with serve_api(control, path) as client, _close_episodes_at_exit(control):
            app = TracedApp(Address(path, read_only=read_only))
            app.animation_level = "none"  # a picture shows the end of an animation
            notices, notify = [], app.notify

            def notify_and_record(message: str, **options: Any) -> None:
                notices.append(message)
                notify(message, **options)

            app.notify = notify_and_record  # type: ignore[method-assign]
            async with app.run_test(size=size, notifications=True) as pilot:
                await wait_until(pilot, lambda: app.linked and app.status is not None)
                yield RunningApp(app, pilot, client, control, seeded, notices)

    return run_app
