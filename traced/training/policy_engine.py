"""The engine that samples a training's rollouts: its interface, and servers behind HTTP as one engine.

Invariants: every request of a rollout names the adapter that ``synchronise`` has published last, never the base; the
name of an iteration's adapter is never used again, not even by a resumed run; requests of two adapters do not overlap,
because ``synchronise`` is called between iterations; an adapter is unloaded after its last request. Adapters of others
on the same server are left alone.

How it fails: ``WrongPolicy`` if a server does not confirm the published adapter, ``EngineError`` if no server answers,
``RequestError`` if one refuses the adapter. Not covered: servers that do not share a file system with the trainer.
"""

import asyncio
import contextlib
import hashlib
import math
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from traced.core.files import publish_folder
from traced.inference.client import EngineClient
from traced.inference.errors import EngineError, RequestError
from traced.inference.generation import Generation, Request
from traced.inference.model_files import adapter_digest
from traced.inference.replicas import Replicas
from traced.training.errors import WrongPolicy

POLICY = "policy"
# Adapters that a server holds at most at a time: the current one, and the last one until its requests have ended.
ADAPTERS_HELD = 2


class EngineLoad:
    """Measures during how much of the time in which work is there the engine works.

    Work is there while an episode waits for its next message; the engine works while it serves a request. The share is
    below 1 if requests are held back, by rounds for instance.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._waiting = self._serving = 0
        self._seconds_waiting = self._seconds_serving = 0.0
        self._changed_at = clock()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as work that waits for the engine or is served by it."""
        self._change(waiting=1)
        try:
            yield
        finally:
            self._change(waiting=-1)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Count the block as work of the engine."""
        self._change(serving=1)
        try:
            yield
        finally:
            self._change(serving=-1)

    def take_busy_share(self) -> float:
        """Return the share since the last call, and start again; NaN if there was no work."""
        self._change()
        share = self._seconds_serving / self._seconds_waiting if self._seconds_waiting else math.nan
        self._seconds_waiting = self._seconds_serving = 0.0
        return share

    def _change(self, waiting: int = 0, serving: int = 0) -> None:
        now = self._clock()
        elapsed, self._changed_at = now - self._changed_at, now
        if self._waiting:
            self._seconds_waiting += elapsed
            self._seconds_serving += elapsed if self._serving else 0.0
        self._waiting += waiting
        self._serving += serving


class PolicyEngine(Protocol):
    """Samples from the policy that is trained; used on one event loop, ``synchronise`` and ``close`` outside of it."""

    load: EngineLoad

    def begin(self, conversations: Iterable[str]) -> None:
        """Announce conversations before their first request; their names sort in a fixed order."""
        ...

    def end(self, conversation: str) -> None:
        """Declare that a conversation has no further requests; repeated calls do nothing."""
        ...

    async def generate(self, request: Request, conversation: str) -> Generation:
        """Sample one completion from the policy of the last ``synchronise``."""
        ...

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        """Sample from the current weights of ``peft_model`` from now on."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


@dataclass
class PublishedAdapter:
    """The adapter of an iteration as servers know it, with the number of its running requests."""

    name: str
    folder: Path
    digest: str
    requests: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request."""
        self.requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.requests -= 1
            if not self.requests:
                self.idle.set()


class ServerEngine:
    """Servers that sample from the adapter of each iteration.

    Args:
        replicas: The servers; they belong to the event loop of ``run``.
        folder: Where the adapters of the iterations are published, on a file system that the servers see.
        run_name: The first part of the adapters' names; no other run that is alive may have the same.
        save: Writes the adapter of a PEFT model into a folder.
        run: Runs a coroutine function on the loop of the rollouts, from outside of it.
    """

    def __init__(
        self,
        replicas: Replicas,
        folder: Path,
        run_name: str,
        save: Callable[[Any, Path], None],
        run: Callable[[Callable[[], Awaitable[None]]], object],
    ) -> None:
        self.load = EngineLoad()
        self._replicas = replicas
        self._folder = folder
        self._run_name = run_name
        self._save = save
        self._run = run
        self._current: PublishedAdapter | None = None
        self._is_clean = False

    def begin(self, conversations: Iterable[str]) -> None:
        """Do nothing: requests are served as they come."""

    def end(self, conversation: str) -> None:
        """Do nothing: no request waits for another one."""

    async def generate(self, request: Request, conversation: str) -> Generation:
        """Sample one completion from the adapter of the iteration; raises the errors of ``Replicas.generate``."""
        adapter = self._current
        if adapter is None:
            # Without an adapter the request would go to the base model.
            raise WrongPolicy("rollouts were requested before the first adapter was published")
        with self.load.serving(), adapter.in_use():
            return await self._replicas.generate(replace(request, adapter=adapter.name), conversation)

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        """Publish the current adapter under a new name, have every server confirm it, and unload the last one."""
        if not self._is_clean:
            self._run(self._unload_remains)
            self._is_clean = True
        name = f"{self._run_name}-i{iteration}-{secrets.token_hex(4)}"
        folder = publish_folder(self._folder / name, lambda staging: self._save(peft_model, staging))
        adapter = PublishedAdapter(name, folder.resolve(), adapter_digest(folder))
        self._run(lambda: self._switch(adapter))

    def close(self) -> None:
        """Unload the adapter and close the connections."""
        self._run(self._close)

    async def _switch(self, adapter: PublishedAdapter) -> None:
        await self._replicas.load_adapter(adapter.name, adapter.folder)
        await asyncio.gather(*(self._confirm(client, adapter) for client in self._replicas.clients))
        last, self._current = self._current, adapter
        if last is not None:
            await self._retire(last)

    async def _confirm(self, client: EngineClient, adapter: PublishedAdapter) -> None:
        """Compare the server's own record of the adapter, as far as it has one, with what was published."""
        try:
            entry = await client.model_entry(adapter.name)
        except EngineError:
            # It gets no requests until it answers again and has loaded the adapter.
            return
        if entry is None:
            raise WrongPolicy(f"{client.url} does not list the adapter {adapter.name!r}, which was loaded on it")
        digest, root = entry.get("digest"), entry.get("root")
        if digest and digest != adapter.digest:
            raise WrongPolicy(
                f"{client.url} serves other weights as {adapter.name!r}: digest {digest[:12]}, "
                f"published {adapter.digest[:12]}"
            )
        if root and Path(root).resolve() != adapter.folder:
            raise WrongPolicy(f"{client.url} serves {adapter.name!r} from {root}; it was published at {adapter.folder}")

    async def _retire(self, adapter: PublishedAdapter) -> None:
        if adapter.requests:
            await adapter.idle.wait()
        await self._replicas.unload_adapter(adapter.name)
        await asyncio.to_thread(shutil.rmtree, adapter.folder, ignore_errors=True)

    async def _unload_remains(self) -> None:
        """Unload what an earlier process of this run has left behind when it was killed."""
        for client in self._replicas.clients:
            with contextlib.suppress(EngineError):
                for name in await client.models():
                    if name.startswith(f"{self._run_name}-i"):
                        with contextlib.suppress(RequestError):
                            await client.unload_adapter(name)
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _close(self) -> None:
        try:
            if self._current is not None:
                last, self._current = self._current, None
                await self._retire(last)
        finally:
            await self._replicas.aclose()


def run_name(run_id: str, out: Path) -> str:
    """Return the first part of the names of a run's adapters; it depends on the run and its folder."""
    return hashlib.sha256(f"{run_id}\0{out.resolve()}".encode()).hexdigest()[:12]
