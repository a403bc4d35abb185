"""Fixtures: a control API over a store with one complete chain of records, and a loop that only records calls."""

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, update

from store.database import open_store, sqlite_url, write_session
from store.tables import AdapterRow
from tests.integration.service.place import Place
from tests.integration.service.scripted import Scripted
from tests.unit.store.chain import T0, save_chain
from traced.api.control import Control
from traced.config.settings import load_settings
from traced.pipeline.train import TrainingStop
from traced.registry.publication import publish

HOOK = "[[notify.commands]]\nname = 'tell'\nargv = ['true']\n"


class RecordingLoop:
    """Cycle loop that does no work and records its calls in ``calls``."""

    def __init__(self) -> None:
        self.running: str | None = None
        self.running_stages: list[str] = []
        self.calls: list[str] = []

    def wake(self) -> None:
        self.calls.append("wake")

    async def stop_cycle(self, cycle_id: str) -> None:
        await asyncio.sleep(0)
        self.calls.append(f"stop {cycle_id}")
        self.running = None

    async def stop_training(self, cycle_id: str, capability: str, decide: Callable[[], TrainingStop]) -> TrainingStop:
        training_stop = await asyncio.to_thread(decide)
        self.calls.append(f"stop {cycle_id} {capability}: {training_stop.message}")
        self.running_stages = []
        return training_stop


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    source = tmp_path / "trained"
    source.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (source / name).write_text(name)
    published = publish(source, tmp_path / "adapters", "date-reasoning", origin="r1")
    with write_session(engine) as session:
        save_chain(session)
        session.execute(update(AdapterRow).values(path=str(published.path), files=published.files))
    yield engine
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def on_either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """Store with the chain of records, once in SQLite and once in PostgreSQL."""
    in_file = request.param == "sqlite"
    engine = open_store(sqlite_url(tmp_path / "traced.db") if in_file else request.getfixturevalue("url"))
    with write_session(engine) as session:
        save_chain(session)
    yield engine
    engine.dispose()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "traced.sock"


@pytest.fixture
def loop() -> RecordingLoop:
    return RecordingLoop()


@pytest.fixture
def control(store: Engine, tmp_path: Path, loop: RecordingLoop) -> Control:
    times = iter(T0 + timedelta(days=1, minutes=minute) for minute in range(1000))

    def now() -> datetime:
        return next(times)

    return Control(load_settings(tmp_path), store, loop, now, T0, state="ready")  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "traced.toml").write_text(HOOK)
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    yield Place(tmp_path, store, Scripted(store, tmp_path))
    store.dispose()
