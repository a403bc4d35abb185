"""What every stage is given: settings, store, target, progress, clock, and an engine that starts when first asked for.

Invariants: one engine process per context, stopped when the context ends, however it ends; adapters are served under
their immutable version names and loaded once. Stage events are written here and nowhere else.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from sandbox.policy import SandboxLimits
from store.database import open_store, reading, session
from store.records import Event, StageEvent, StageState
from store.repositories.cycles import save_stage_event
from store.repositories.events import save_event
from traced.config.settings import Settings
from traced.core.ownership import sandbox_owner
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles, resolve_model
from traced.targets.registry import Target, target

if TYPE_CHECKING:
    from traced.inference.client import EngineClient
    from traced.inference.engine_process import EngineProcess


def utc_now() -> datetime:
    """The time as the store keeps it."""
    return datetime.now(UTC)


@dataclass
class EngineSlot:
    """The context's engine: nothing until the first stage asks for it."""

    process: "EngineProcess | None" = None
    client: "EngineClient | None" = None
    loaded: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Context:
    """The surroundings of a stage; ``cycle_id`` is the cycle that its rows belong to."""

    settings: Settings
    store: sqlalchemy.Engine
    target: Target
    model: ModelFiles
    cycle_id: str
    progress: Progress
    meter: Meter
    now: Callable[[], datetime] = utc_now
    slot: EngineSlot = field(default_factory=EngineSlot)

    @property
    def data_dir(self) -> Path:
        """The data directory."""
        return self.settings.data_dir

    @property
    def run_dir(self) -> Path:
        """The cycle's own folder."""
        return self.data_dir / "runs" / self.cycle_id

    @property
    def sandbox_limits(self) -> SandboxLimits:
        """What a container of the cycle may use."""
        return SandboxLimits(**self.settings.sandbox.model_dump())

    @property
    def sandbox_owner(self) -> str:
        """Whose the cycle's containers are."""
        return sandbox_owner(self.data_dir)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction on the store."""
        with session(self.store) as opened:
            yield opened

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A snapshot of the store."""
        with reading(self.store) as opened:
            yield opened

    async def engine(self) -> "EngineClient":
        """The engine's client; starts the engine if it does not run yet (this blocks until it answers)."""
        if self.slot.client is None:
            from traced.inference.client import EngineClient  # the daemon has a context and no engine: 10 MB
            from traced.inference.engine_process import start_embedded

            settings = self.settings.engine
            self.slot.process = start_embedded(
                self.model.path,
                data_dir=self.data_dir,
                threads=self.settings.threads,
                max_batch=settings.max_batch,
                max_length=settings.max_length,
                timeout_s=settings.start_timeout_s,
            )
            self.slot.client = EngineClient(self.slot.process.url)
        return self.slot.client

    async def serve(self, name: str, path: Path) -> None:
        """Have the engine serve an adapter directory under ``name``; a version that it has is not loaded again."""
        client = await self.engine()
        if name not in self.slot.loaded:
            await client.load_adapter(name, path)
            self.slot.loaded.add(name)

    def event(self, stage: str, state: StageState, capability: str | None = None, **detail: Any) -> None:
        """Record what happened to a stage."""
        with self.writing() as opened:
            at = self.now()
            save_stage_event(opened, StageEvent(self.cycle_id, stage, state, at, capability, detail))
            save_event(
                opened, Event(at, f"stage {state.value}", stage, self.cycle_id, {"capability": capability} | detail)
            )

    @contextmanager
    def stage(self, stage: str, title: str, capability: str | None = None, total: int = 0) -> Iterator["Shown"]:
        """A stage at work: its events in the store, its line on the screen. Who catches a failure records it."""
        shown = Shown(self.progress, f"{stage} {capability or ''}".strip())
        self.event(stage, StageState.STARTED, capability)
        self.progress.start(shown.key, title, total)
        yield shown
        self.event(stage, StageState.FINISHED, capability, **shown.found)
        self.progress.finish(shown.key, shown.figure)


@dataclass
class Shown:
    """A running stage's line; ``found`` goes into its closing event, ``figure`` on the screen."""

    progress: Progress
    key: str
    figure: str = ""
    found: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps: int = 1, figure: str | None = None) -> None:
        """``steps`` more are done."""
        self.progress.advance(self.key, steps, figure)

    def reach(self, done: int, figure: str | None = None, total: int | None = None) -> None:
        """``done`` are done in all, of ``total`` where that is known by now."""
        self.progress.advance(self.key, done - self.progress.lines[self.key].done, figure, total)


@asynccontextmanager
async def opened(settings: Settings, cycle_id: str, progress: Progress, meter: Meter) -> AsyncIterator[Context]:
    """A context on the data directory of ``settings``; its engine and store are closed at the end."""
    model = resolve_model(settings.model.spec, settings.data_dir)
    store = open_store(settings.store_url)
    context = Context(settings, store, target(settings.target.name), model, cycle_id, progress, meter)
    try:
        yield context
    finally:
        try:
            if context.slot.client is not None:
                await context.slot.client.aclose()
        finally:
            if context.slot.process is not None:
                context.slot.process.stop()
            store.dispose()
