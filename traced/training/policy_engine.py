"""The engine that samples a training's rollouts: its interface, and servers behind HTTP as one engine.

Invariants: every request of a rollout names the adapter that ``synchronise`` has published last, never the base; the
name of an iteration's adapter is never used again, not even by a resumed run; requests of two adapters do not overlap,
because ``synchronise`` is called between iterations; an adapter is unloaded after its last request. Adapters of others
on the same server are left alone, except those of trainings of the same data directory whose process has ended
(``unload_abandoned``). Servers that sleep during updates are awake before an adapter is loaded.

How it fails: ``WrongPolicy`` if a server does not confirm the published adapter, ``EngineError`` if no server answers,
``RequestError`` if one refuses the adapter. Not covered: servers that do not share a file system with the trainer.
"""

import asyncio
import contextlib
import hashlib
import logging
import math
import re
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from traced.core.files import publish_file, publish_folder
from traced.core.ownership import is_alive, own_identity
from traced.inference.client import EngineClient, server_key
from traced.inference.engine_sleep import EngineSleep
from traced.inference.errors import EngineError, RequestError
from traced.inference.generation import Generation, Request
from traced.inference.model_files import adapter_digest
from traced.inference.replicas import Replicas
from traced.training.errors import WrongPolicy
from traced.training.job import TrainingJob

POLICY = "policy"
# The name of an iteration's adapter: run, iteration, random part.
NAME = re.compile(r"[0-9a-f]{12}-i\d+-[0-9a-f]{8}")
# Adapters that a server holds at most at a time: the current one, and the last one until its requests have ended.
ADAPTERS_HELD = 2


log = logging.getLogger(__name__)


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
    """Samples from the policy that is trained.

    ``begin``, ``end`` and ``generate`` are used on one event loop, the other methods outside of it.
    """

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

    def begin_update(self) -> None:
        """Leave the device to the update; no request runs, and none comes before ``end_update``."""
        ...

    def end_update(self) -> None:
        """Return when requests are served again."""
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
        sleep: Puts the servers to sleep during updates; None: they stay awake.
    """

    def __init__(
        self,
        replicas: Replicas,
        folder: Path,
        run_name: str,
        save: Callable[[Any, Path], None],
        run: Callable[[Callable[[], Awaitable[None]]], object],
        *,
        sleep: EngineSleep | None = None,
    ) -> None:
        self.load = EngineLoad()
        self._replicas = replicas
        self._folder = folder
        self._run_name = run_name
        self._save = save
        self._run = run
        self._sleep = sleep
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
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            publish_file(owner_file(self._folder), own_identity())
            self._is_clean = True
        name = f"{self._run_name}-i{iteration}-{secrets.token_hex(4)}"
        folder = publish_folder(self._folder / name, lambda staging: self._save(peft_model, staging))
        adapter = PublishedAdapter(name, folder.resolve(), adapter_digest(folder))
        self._run(lambda: self._switch(adapter))

    def begin_update(self) -> None:
        """Put the servers to sleep, if they do that."""
        if self._sleep is not None:
            self._run(self._sleep.begin_update)

    def end_update(self) -> None:
        """Wake up the servers; raises ``EngineError`` if one stays asleep."""
        if self._sleep is not None:
            self._run(self._sleep.end_update)

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
            owner_file(self._folder).unlink(missing_ok=True)


def engine_clients(job: TrainingJob) -> list[EngineClient]:
    """Return clients of the servers that sample a job's rollouts."""
    key = server_key(job.engine_key_file)
    return [EngineClient(url, silence_s=job.engine_silence_s, key=key) for url in job.engine_urls]


def owner_file(folder: Path) -> Path:
    """Return the file with the identity of the process that publishes adapters in this folder."""
    return folder.with_name(f"{folder.name}.owner")


async def unload_abandoned(clients: Sequence[EngineClient], data_dir: Path) -> None:
    """Unload the iterations' adapters of a data directory whose training has ended without doing so.

    Servers that do not answer, or do not state an adapter's folder, are passed over.
    """
    for client in clients:
        with contextlib.suppress(EngineError):
            for name in filter(NAME.fullmatch, await client.models()):
                entry = await client.model_entry(name) or {}
                if _is_abandoned(Path(entry.get("root") or ""), data_dir):
                    log.info("unloading %s from %s: its training has ended", name, client.url)
                    with contextlib.suppress(RequestError):
                        await client.unload_adapter(name)


def _is_abandoned(adapter: Path, data_dir: Path) -> bool:
    """Return whether an adapter's folder belongs to a training of the data directory that has ended."""
    if not adapter.resolve().is_relative_to(data_dir.resolve()):
        return False
    try:
        owner = owner_file(adapter.resolve().parent).read_text(encoding="utf-8")
    except FileNotFoundError:
        return True
    # None: on another machine, where it may be alive.
    return is_alive(owner) is False


def run_name(run_id: str, out: Path) -> str:
    """Return the first part of the names of a run's adapters; it depends on the run and its folder."""
    return hashlib.sha256(f"{run_id}\0{out.resolve()}".encode()).hexdigest()[:12]
