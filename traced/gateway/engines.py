"""The pool of engines behind the gateway: health, loaded adapters, sleep, and the choice of an engine for a request.

Invariants: an engine gets requests for an adapter only after it has confirmed loading it, and the adapter is unloaded
only after its last request there has ended. Of the router's adapters an engine never holds more than ``max_adapters``
at once; the router loads none into an engine whose slots are taken, by trainings for instance. A sleeping engine gets
no requests. An engine that fails ``/health`` gets no requests until it answers again; its adapters are then loaded
again. Not covered: starting engines.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from traced.inference.client import BASE, EngineClient
from traced.inference.errors import ServingError

POLL_S = 0.5
HEALTH_S = 5.0
# The name of an adapter version. Other adapters at the engine are not managed by traced and never unloaded.
ADAPTER_NAME = re.compile(r".+@v\d+")
# A conversation stays at its engine to reuse the prefix cache, unless this engine has more than AFFINITY requests more
# than the least busy one.
AFFINITY = 4
log = logging.getLogger(__name__)


@dataclass
class Replica:
    """One engine and its state.

    Args:
        loaded: The adapters whose loading the engine has confirmed.
        running: The number of running requests by model.
        problem: Why the engine gets no requests, in words; "" if it is healthy.
        sleep_reason: Why the engine should sleep; "" if it should be awake, None if neither was requested.
        asleep: Whether the engine sleeps; None if it has to be queried.
        wake_event: Set it to have the engine checked at once.
    """

    client: EngineClient
    healthy: bool = False
    loaded: set[str] = field(default_factory=set)
    running: Counter[str] = field(default_factory=Counter)
    problem: str = "not checked yet"
    sleep_reason: str | None = None
    asleep: bool | None = None
    wake_event: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Return the engine's URL."""
        return self.client.url

    @property
    def busy(self) -> int:
        """Return the number of running requests of all models."""
        return self.running.total()

    def serves(self, model: str) -> bool:
        """Return whether the engine can take requests for ``model``."""
        return self.healthy and not self.sleep_reason and (model == BASE or model in self.loaded)

    def upstream(self, model: str) -> str:
        """Return the engine's own name for ``model``."""
        return self.client.base if model == BASE else model

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[None]:
        """Count a running request for ``model`` while the context is active."""
        self.running[model] += 1
        try:
            yield
        finally:
            self.running[model] -= 1

    def mark_failed(self, reason: str) -> None:
        """Mark the engine as unavailable, so that it gets no requests until a check succeeds."""
        if self.healthy:
            log.warning("engine %s is not available: %s", self.url, reason)
        self.healthy, self.problem, self.asleep = False, reason, None
        # The engine may have been restarted and have lost its adapters.
        self.loaded.clear()


@dataclass
class Pool:
    """All engines behind the gateway.

    Args:
        max_adapters: The number of the router's adapters that each engine holds at most.
        slots: The number of adapters that each engine holds at most, with those of others; 0: ``max_adapters``.
        adapters: The adapter versions that should be loaded, with their directories.
        check_adapter: Raises ``ModelError`` for the folder of an adapter of another base model.
    """

    replicas: list[Replica]
    max_adapters: int
    adapters: Mapping[str, Path] = field(default_factory=dict)
    check_adapter: Callable[[Path], None] = lambda path: None
    slots: int = 0

    def pick(self, model: str, conversation_id: str) -> Replica | None:
        """Return the engine for a request, or None if no engine serves the model."""
        serving = [replica for replica in self.replicas if replica.serves(model)]
        if not serving:
            return None
        if len(serving) == 1:
            return serving[0]
        preferred = max(serving, key=lambda replica: _weight(replica.url, conversation_id))
        least_busy = min(serving, key=lambda replica: replica.busy)
        return preferred if preferred.busy <= least_busy.busy + AFFINITY else least_busy

    def serves(self, model: str) -> bool:
        """Return whether any engine serves the model."""
        return any(replica.serves(model) for replica in self.replicas)

    def set_adapters(self, adapters: Mapping[str, Path]) -> None:
        """Set the adapters that should be loaded, and have the engines checked at once."""
        self.adapters = adapters
        for replica in self.replicas:
            replica.wake_event.set()

    def set_sleep_reason(self, reason: str) -> None:
        """Have the engines put to sleep for this reason, or woken up if it is ""."""
        for replica in self.replicas:
            if replica.sleep_reason != reason:
                replica.sleep_reason = reason
                replica.wake_event.set()

    async def run(self) -> None:
        """Check the engines until cancelled."""
        # One task per engine, so that an engine that hangs delays no other.
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._run_checks(replica))

    async def _run_checks(self, replica: Replica) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await replica.wake_event.wait()
            replica.wake_event.clear()
            await self._check(replica)

    async def check_all(self) -> None:
        """Check every engine once; must not be called while ``Pool.run`` is active."""
        await asyncio.gather(*(self._check(replica) for replica in self.replicas))

    async def close(self) -> None:
        """Close the connections to the engines."""
        await asyncio.gather(*(replica.client.aclose() for replica in self.replicas))

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(HEALTH_S):
                if not await replica.client.health():
                    return replica.mark_failed("it does not answer /health")
                models = await replica.client.models()
                if replica.asleep is None:
                    replica.asleep = await replica.client.is_sleeping()
        except (ServingError, TimeoutError) as error:
            return replica.mark_failed(str(error) or "it does not answer within five seconds")
        if not models:
            return replica.mark_failed("its model list is empty")
        if (replica.sleep_reason or replica.asleep) and not await _apply_sleep(replica):
            return None
        if not replica.healthy:
            log.info("engine %s is available", replica.url)
        replica.client.base, replica.healthy, replica.problem = models[0], True, ""
        replica.loaded &= set(models)
        engine_adapters = set(models[1:])
        await self._unload(replica, engine_adapters)
        await self._load(replica, engine_adapters)
        return None

    async def _unload(self, replica: Replica, engine_adapters: set[str]) -> None:
        for name in sorted(engine_adapters - set(self.adapters)):
            if not ADAPTER_NAME.fullmatch(name):
                continue
            # New requests stop at once; the adapter is unloaded when its running requests have ended.
            replica.loaded.discard(name)
            if not replica.running[name] and await _succeeds(replica, name, replica.client.unload_adapter(name)):
                engine_adapters.discard(name)

    async def _load(self, replica: Replica, engine_adapters: set[str]) -> None:
        for name, path in self.adapters.items():
            if name not in engine_adapters:
                # Never load more adapters than the engine has slots: otherwise vLLM reassigns the slot of an adapter
                # that a running request uses, and that request continues with other weights (vLLM issue 47724).
                count = sum(ADAPTER_NAME.fullmatch(other) is not None for other in engine_adapters)
                if count >= self.max_adapters or len(engine_adapters) >= max(self.slots, self.max_adapters):
                    names = ", ".join(sorted(engine_adapters))
                    log.warning("engine %s is full: %s waits for one of %s", replica.url, name, names)
                    continue
                if not await _succeeds(replica, name, self._load_checked(replica, name, path)):
                    continue
                engine_adapters.add(name)
            replica.loaded.add(name)

    async def _load_checked(self, replica: Replica, name: str, path: Path) -> None:
        await asyncio.to_thread(self.check_adapter, path)
        await replica.client.load_adapter(name, path)


async def _apply_sleep(replica: Replica) -> bool:
    """Put the engine to sleep or wake it up; return True only if it was woken up."""
    reason = replica.sleep_reason
    if reason is None:
        # Another client put the engine to sleep and may wake it up, so the state is queried again at the next check.
        replica.healthy, replica.asleep = False, None
        replica.problem = "asleep; traced wakes it only if serving.sleep_for_training is set"
        return False
    try:
        if not reason:
            await replica.client.wake_up()
            replica.asleep = False
            return True
        if not replica.asleep and not replica.busy:
            await replica.client.sleep()
            replica.asleep = True
            log.info("engine %s sleeps: %s", replica.url, reason)
    except ServingError as error:
        # The call may have taken effect despite the error, so the state is queried before the engine gets requests.
        replica.asleep = None
        reason = f"it supports no sleep mode: {error}"
        log.warning("engine %s: %s", replica.url, reason)
    replica.healthy, replica.problem = False, f"asleep: {reason}" if replica.asleep else reason
    return False


async def _succeeds(replica: Replica, name: str, call: Coroutine[object, None, None]) -> bool:
    try:
        await call
    except ServingError as error:
        log.warning("engine %s, adapter %s: %s", replica.url, name, error)
        return False
    return True


def _weight(url: str, conversation_id: str) -> int:
    """Return the engine's weight for rendezvous hashing, which keeps a conversation's engine while others change."""
    return int.from_bytes(hashlib.blake2b(f"{url} {conversation_id}".encode(), digest_size=8).digest())
