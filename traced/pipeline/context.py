"""The shared context of a cycle's stages: settings, store, target, clock, progress, and an engine started on demand.

Invariants: at most one engine per context, closed when the context ends; an adapter version is loaded once. Stage
events are written here and nowhere else.

A stage gets its engine from the context and not as an argument, because an engine takes up to minutes to start. Stages
that play no episode (analyze, promote, report), and those whose episodes are stored already, must not start one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy
from sqlmodel import Session

from sandbox.client import SandboxSource
from sandbox.episodes import EpisodeSource
from sandbox.policy import SandboxLimits
from sandbox.user import User, asks_for_model
from store.database import open_store, read_session, write_session
from store.records import Event, StageEvent, StageState
from store.repositories.attempts import release_succeeded
from store.repositories.cycles import save_stage_event
from store.repositories.events import save_event
from traced.config.settings import Settings
from traced.core.ownership import sandbox_owner
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles, base_model
from traced.rollouts.model_user import model_user
from traced.targets.description import MODEL_USER
from traced.targets.registry import Target, target

if TYPE_CHECKING:
    from traced.inference.client import EngineClient
    from traced.inference.start import RunningEngine
    from traced.routing.embeddings import EmbeddingSource


def utc_now() -> datetime:
    """Return the current time as the store keeps it."""
    return datetime.now(UTC)


@dataclass
class EngineSlot:
    """The engine of a context, and the client of the embeddings beside it; empty until a stage first uses them."""

    engine: "RunningEngine | None" = None
    embedding_client: "EngineClient | None" = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        """Close the connections and stop the engines."""
        try:
            if self.engine is not None:
                await self.engine.close()
        finally:
            if self.embedding_client is not None:
                await self.embedding_client.aclose()


@dataclass(frozen=True)
class Context:
    """The resources of a cycle's stages; ``cycle_id`` is the cycle that stored rows belong to."""

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
        """Return the data directory."""
        return self.settings.data_dir

    @property
    def run_dir(self) -> Path:
        """Return the cycle's own folder."""
        return self.data_dir / "runs" / self.cycle_id

    @property
    def sandbox_limits(self) -> SandboxLimits:
        """Return the resource limits of the cycle's containers."""
        return SandboxLimits(**self.settings.sandbox.model_dump())

    @property
    def sandbox_owner(self) -> str:
        """Return the owner label of the cycle's containers."""
        return sandbox_owner(self.data_dir)

    @contextmanager
    def write_session(self) -> Iterator[Session]:
        """Open a write transaction on the store."""
        with write_session(self.store) as session:
            yield session

    @contextmanager
    def read_session(self) -> Iterator[Session]:
        """Open a consistent read of the store."""
        with read_session(self.store) as session:
            yield session

    async def engine(self) -> "RunningEngine":
        """Return the engine of the settings; the first call starts it and blocks until it answers."""
        async with self.slot.lock:
            if self.slot.engine is None:
                # Imported here because the daemon has a context but no engine: this saves it 10 MB.
                from traced.inference.start import connect

                self.slot.engine = await connect(self.settings)
                if self.slot.engine.process is None:
                    from traced.training.policy_engine import unload_abandoned

                    await unload_abandoned(self.slot.engine.replicas.clients, self.data_dir)
            return self.slot.engine

    async def serve(self, name: str, path: Path) -> None:
        """Serve an adapter directory under ``name``; a version that is loaded is not loaded again."""
        engine = await self.engine()
        await engine.serve(name, path)

    @asynccontextmanager
    async def target_source(self) -> AsyncIterator[EpisodeSource]:
        """Open the source of the target's episodes, with the model of ``[target.user]`` if its user is one.

        Raises:
            TargetFault: The target cannot be loaded.
            UserUnavailable: The user's model is not configured completely.
        """
        async with (
            self._user(is_requested=self.target.description.user == MODEL_USER) as user,
            self.target.source(user) as source,
        ):
            yield source

    @asynccontextmanager
    async def environment_source(self, source_code: str) -> AsyncIterator[SandboxSource]:
        """Open the source of a synthetic environment's episodes, with the model of ``[target.user]`` if it asks for it.

        Raises:
            UserUnavailable: The user's model is not configured completely.
            SandboxError: The environment cannot be loaded, or Docker cannot be used.
        """
        limits, owner = self.sandbox_limits, self.sandbox_owner
        async with (
            self.environment_user(source_code) as user,
            SandboxSource(source_code, limits=limits, owner=owner, user=user) as source,
        ):
            yield source

    def environment_user(self, source_code: str) -> AbstractAsyncContextManager[User | None]:
        """Open the model of ``[target.user]`` if a synthetic environment asks for it; raises ``UserUnavailable``."""
        return self._user(is_requested=asks_for_model(source_code))

    def _user(self, *, is_requested: bool) -> AbstractAsyncContextManager[User | None]:
        if not is_requested:
            return nullcontext()
        # Imported here because the client library takes a second, which only such episodes need.
        from traced.llm.connection import StoreLedger

        ledger = StoreLedger(self.store, self.now)
        return model_user(self.settings.target.user, self.data_dir, ledger, self.cycle_id)

    async def embedding_source(self) -> "EmbeddingSource":
        """Return the source of embeddings that ``traced serve`` decides on; raises ``EmbeddingsError``.

        It is the server at ``routing.embeddings_url``, else the engine, which may have no embeddings.
        """
        from traced.inference.client import EngineClient
        from traced.inference.engine_urls import server_root
        from traced.routing.embeddings import EmbeddingSource, source_beside

        routing = self.settings.routing
        if not routing.embeddings_url:
            return EmbeddingSource((await self.engine()).client)
        async with self.slot.lock:
            if self.slot.embedding_client is None:
                self.slot.embedding_client = EngineClient(server_root(routing.embeddings_url))
        return await source_beside(self.slot.embedding_client, routing.embeddings_model)

    def event(self, stage: str, state: StageState, capability: str | None = None, **detail: Any) -> None:
        """Record an event of a stage."""
        with self.write_session() as session:
            at = self.now()
            save_stage_event(session, StageEvent(self.cycle_id, stage, state, at, capability, detail))
            save_event(
                session, Event(at, f"stage {state.value}", stage, self.cycle_id, {"capability": capability} | detail)
            )
            if state is StageState.FINISHED:
                release_succeeded(session, self.cycle_id, stage, capability or "", at=at)

    @contextmanager
    def stage(self, stage: str, title: str, capability: str | None = None, total: int = 0) -> Iterator["RunningStage"]:
        """Run a stage: record its start and end, and show its progress.

        A failure of the body is recorded by the code that catches it.
        """
        running = RunningStage(self.progress, f"{stage} {capability or ''}".strip())
        self.event(stage, StageState.STARTED, capability)
        self.progress.start(running.key, title, total)
        yield running
        self.event(stage, StageState.FINISHED, capability, **running.detail)
        self.progress.finish(running.key, running.figure)


@dataclass
class RunningStage:
    """A running stage: ``detail`` goes into its closing event, ``figure`` onto its progress line."""

    progress: Progress
    key: str
    figure: str = ""
    detail: dict[str, Any] = field(default_factory=dict)

    def advance(self, steps: int = 1, figure: str | None = None) -> None:
        """Report ``steps`` more units of work."""
        self.progress.advance(self.key, steps, figure)

    def reach(self, done: int, figure: str | None = None, total: int | None = None) -> None:
        """Report ``done`` units in all, of ``total`` if that is known."""
        self.progress.advance(self.key, done - self.progress.lines[self.key].done, figure, total)


@asynccontextmanager
async def open_context(settings: Settings, cycle_id: str, progress: Progress, meter: Meter) -> AsyncIterator[Context]:
    """Open a context on the data directory of ``settings`` and close its engine and store at the end."""
    model = base_model(settings)
    store = open_store(settings.store_url)
    context = Context(settings, store, target(settings), model, cycle_id, progress, meter)
    try:
        yield context
    finally:
        try:
            await context.slot.close()
        finally:
            store.dispose()
