"""Several engines with the same base model behind one interface.

Invariants: a conversation stays at its engine while that is not much busier than the others, so that its prefix cache
is used; an engine that fails gets no further requests until it lists its models again, which the next requests check
once per ``RETRY_S``; a request that lost its engine is sent to another one, which is safe because a request is complete
in itself, but at most ``ATTEMPTS`` times, because a request may be what ends the engine. An adapter counts as served
once every engine that answers has confirmed it; an engine that comes back gets the current adapters before a request.

How it fails: ``EngineError`` when no engine answers for ``patience_s`` after a loss, or when an engine refuses a
request as overloaded for its ``silence_s``; ``RequestError`` and its children at once. Not covered: engines that join
later.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from traced.inference.client import EngineClient
from traced.inference.errors import EngineError, OverloadedError, RequestError, ServingError, UnknownModelError
from traced.inference.generation import Generation, Request

T = TypeVar("T")
# A conversation leaves its engine when that has this many more requests than the least busy one.
AFFINITY = 4
RETRY_S = 1.0
POLL_S = 0.1
ATTEMPTS = 4
# Between two requests to an engine that is overloaded and states no time.
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
log = logging.getLogger(__name__)


@dataclass
class Replica:
    """One engine: its running requests, its confirmed adapters, and why it gets no requests ("" if it does)."""

    client: EngineClient
    running: Counter[str] = field(default_factory=Counter)
    adapters: set[str] = field(default_factory=set)
    problem: str = ""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    recovery: "asyncio.Task[None] | None" = None
    recover_at: float = 0.0  # monotonic second of the next attempt

    @property
    def busy(self) -> int:
        """Return the number of running requests."""
        return self.running.total()


def preferred(urls: Sequence[str], conversation: str) -> str:
    """Return the URL that rendezvous hashing gives to a conversation; it stays the same while others come and go."""

    def weight(url: str) -> bytes:
        return hashlib.blake2b(f"{url} {conversation}".encode(), digest_size=8).digest()

    return max(urls, key=weight)


class Replicas:
    """A client of one or more engines; close it with ``aclose``."""

    def __init__(self, clients: Sequence[EngineClient], *, patience_s: float = 60.0) -> None:
        self.replicas = [Replica(client) for client in clients]
        self.patience_s = patience_s
        self._adapters: dict[str, Path] = {}

    @property
    def clients(self) -> list[EngineClient]:
        """Return the clients of all engines."""
        return [replica.client for replica in self.replicas]

    async def aclose(self) -> None:
        """Close the connections."""
        recoveries = [replica.recovery for replica in self.replicas if replica.recovery is not None]
        for recovery in recoveries:
            recovery.cancel()
        await asyncio.gather(*recoveries, return_exceptions=True)
        await asyncio.gather(*(client.aclose() for client in self.clients))

    async def generate(self, request: Request, conversation: str = "") -> Generation:
        """Complete a prompt of token ids on one of the engines."""
        return await self.on_one(lambda client: client.generate(request), request.adapter or "", conversation)

    async def on_one(
        self, call: Callable[[EngineClient], Awaitable[T]], adapter: str = "", conversation: str = ""
    ) -> T:
        """Return the answer of one engine to ``call``; another engine is tried if that one fails."""
        attempts, refusals, refused_at = 0, 0, 0.0
        while True:
            replica = await self._pick(adapter, conversation)
            try:
                with _count_request(replica, adapter):
                    return await call(replica.client)
            except OverloadedError as error:
                now = time.monotonic()
                refused_at = refused_at or now
                pause_s = error.retry_after_s or BACK_OFF_S[min(refusals, len(BACK_OFF_S) - 1)]
                if now + pause_s > refused_at + replica.client.silence_s:
                    raise
                refusals += 1
                await asyncio.sleep(pause_s)
            except EngineError as error:
                attempts += 1
                await self._examine(replica, error)
                # If the engine lives, its failure belongs to this request.
                if not replica.problem or attempts == ATTEMPTS:
                    raise
            except UnknownModelError as error:
                attempts += 1
                # A restarted engine has lost its adapters.
                if adapter not in self._adapters or attempts == ATTEMPTS:
                    raise
                replica.adapters.clear()
                replica.problem = str(error)

    async def load_adapter(self, name: str, path: Path) -> None:
        """Serve a PEFT directory under ``name`` on every engine that answers, and have each of them confirm it.

        Raises:
            RequestError: An engine refuses the adapter, or does not list it afterwards.
            EngineError: No engine answers for ``patience_s``.
        """
        self._adapters[name] = path
        give_up_at = time.monotonic() + self.patience_s
        try:
            while not await self._load_everywhere(name):
                if time.monotonic() > give_up_at:
                    raise EngineError("; ".join(f"{r.client.url}: {r.problem}" for r in self.replicas))
                await asyncio.sleep(RETRY_S)
        except ServingError:
            # An engine that has loaded it would keep it.
            await self.unload_adapter(name)
            raise
        except BaseException:
            del self._adapters[name]
            raise

    async def _load_everywhere(self, name: str) -> bool:
        """Load the adapter on the engines that answer; return whether any of them has it."""
        recoveries = [self._recover(replica) for replica in self.replicas]
        results = await asyncio.gather(*recoveries, return_exceptions=True)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            raise error
        return any(name in replica.adapters for replica in self.replicas)

    async def unload_adapter(self, name: str) -> None:
        """Stop serving an adapter; engines that do not answer or do not know it are passed over."""
        self._adapters.pop(name, None)
        for replica in self.replicas:
            replica.adapters.discard(name)
            with contextlib.suppress(EngineError, RequestError):
                await replica.client.unload_adapter(name)

    async def _pick(self, adapter: str, conversation: str) -> Replica:
        give_up_at = time.monotonic() + self.patience_s
        while True:
            self._start_recoveries()
            ready = [r for r in self.replicas if not r.problem and (not adapter or adapter in self._loaded(r, adapter))]
            if ready:
                least_busy = min(ready, key=lambda replica: replica.busy)
                url = preferred([replica.client.url for replica in ready], conversation)
                favourite = next(replica for replica in ready if replica.client.url == url)
                return favourite if favourite.busy <= least_busy.busy + AFFINITY else least_busy
            if time.monotonic() > give_up_at:
                problems = "; ".join(f"{replica.client.url}: {replica.problem}" for replica in self.replicas)
                raise EngineError(
                    f"no engine answers for {self.patience_s:g} s: {problems}",
                    hint="traced doctor; requests wait for engine.patience_s, or engine.start_timeout_s if traced has "
                    "started vLLM",
                )
            running = [r.recovery for r in self.replicas if r.recovery is not None and not r.recovery.done()]
            if running:
                await asyncio.wait(running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_S)

    def _start_recoveries(self) -> None:
        """Examine failed engines in the background, each once per ``RETRY_S``."""
        now = time.monotonic()
        for replica in self.replicas:
            lacks = bool(self._adapters.keys() - replica.adapters)
            idle = replica.recovery is None or replica.recovery.done()
            if idle and (replica.problem or lacks) and now >= replica.recover_at:
                replica.recover_at = now + RETRY_S
                replica.recovery = asyncio.create_task(self._try_recovery(replica))

    async def _try_recovery(self, replica: Replica) -> None:
        try:
            await self._recover(replica)
        except ServingError as error:
            # For example an adapter that an engine refuses after its restart: the others serve it.
            replica.problem = str(error)

    def _loaded(self, replica: Replica, adapter: str) -> set[str]:
        # An adapter that somebody else has loaded is not in the list of this client.
        return replica.adapters if adapter in self._adapters else {adapter}

    async def _examine(self, replica: Replica, error: EngineError) -> None:
        """Mark the engine as failed unless it still answers."""
        if not await replica.client.health():
            if not replica.problem:
                log.warning("engine %s fails: %s", replica.client.url, error)
            replica.problem = str(error)
            replica.adapters.clear()

    async def _recover(self, replica: Replica) -> None:
        """Load the missing adapters on an engine and mark it as ready, unless it does not answer."""
        async with replica.lock:
            missing = self._adapters.keys() - replica.adapters
            if not replica.problem and not missing:
                return
            try:
                models = set(await replica.client.models())
                for name in sorted(missing):
                    if name not in models:
                        await replica.client.load_adapter(name, self._adapters[name])
                if missing:
                    await self._confirm(replica, missing)
            except EngineError as error:
                replica.problem = str(error)
                return
            replica.adapters |= missing
            replica.problem = ""

    async def _confirm(self, replica: Replica, names: set[str]) -> None:
        absent = names - set(await replica.client.models())
        if absent:
            raise RequestError(f"{replica.client.url} has loaded {sorted(absent)[0]!r} but does not list it")


@contextlib.contextmanager
def _count_request(replica: Replica, adapter: str) -> Iterator[None]:
    replica.running[adapter] += 1
    try:
        yield
    finally:
        replica.running[adapter] -= 1
