"""The pool of engines behind the gateway: health, loaded adapters, sleep, and the choice of an engine for a request.

Invariants: an adapter takes requests at an engine only after the engine has confirmed its loading, and is unloaded only
after its last request there; an engine never holds more than ``max_adapters`` at once; a sleeping engine takes no
requests. An engine that fails ``/health`` takes no requests until it answers again, and then gets its adapters anew.
Not covered: starting engines.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from traced.inference.client import BASE, EngineClient
from traced.inference.errors import ServingError

POLL_S = 0.5
HEALTH_S = 5.0
# The name of an adapter version; other adapters at the engine belong to somebody else.
ADAPTER_NAME = re.compile(r".+@v\d+")
# A conversation stays at its engine, for the prefix cache, unless that has so many requests more than another.
AFFINITY = 4
log = logging.getLogger(__name__)


@dataclass
class Replica:
    """One engine and its state.

    Args:
        loaded: The adapters that it has confirmed.
        running: The number of its requests by model.
        problem: Why it takes no requests, for people.
        sleep_reason: Why it should sleep; "" if it should be awake, None if nothing was requested.
        asleep: Whether it sleeps; None if it has to be queried.
        wake_event: Set to have it checked at once.
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
        """The engine's URL."""
        return self.client.url

    @property
    def busy(self) -> int:
        """The number of its requests."""
        return self.running.total()

    def serves(self, model: str) -> bool:
        """Whether it takes requests for ``model``."""
        return self.healthy and not self.sleep_reason and (model == BASE or model in self.loaded)

    def upstream(self, model: str) -> str:
        """The engine's own name for ``model``."""
        return self.client.base if model == BASE else model

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[None]:
        """Count a request for ``model`` while the body runs."""
        self.running[model] += 1
        try:
            yield
        finally:
            self.running[model] -= 1

    def mark_failed(self, reason: str) -> None:
        """Stop sending requests until the engine answers again."""
        if self.healthy:
            log.warning("engine %s is not available: %s", self.url, reason)
        self.healthy, self.problem, self.asleep = False, reason, None
        # It may have been restarted, without its adapters.
        self.loaded.clear()


@dataclass
class Pool:
    """All engines; ``adapters`` maps the versions that should be loaded to their directories."""

    replicas: list[Replica]
    max_adapters: int
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def pick(self, model: str, conversation_id: str) -> Replica | None:
        """Choose the engine for a request; None if no engine serves the model."""
        serving = [replica for replica in self.replicas if replica.serves(model)]
        if not serving:
            return None
        if len(serving) == 1:
            return serving[0]
        preferred = max(serving, key=lambda replica: _weight(replica.url, conversation_id))
        least_busy = min(serving, key=lambda replica: replica.busy)
        return preferred if preferred.busy <= least_busy.busy + AFFINITY else least_busy

    def serves(self, model: str) -> bool:
        """Whether any engine serves the model."""
        return any(replica.serves(model) for replica in self.replicas)

    def set_adapters(self, adapters: Mapping[str, Path]) -> None:
        """Set the adapters that should be loaded, and check the engines at once."""
        self.adapters = adapters
        for replica in self.replicas:
            replica.wake_event.set()

    def set_sleep_reason(self, reason: str) -> None:
        """Have the engines sleep for this reason, or wake up if it is ""."""
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
        """Check every engine once; not while ``run`` is active."""
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
            # First no new requests, then the unloading once the running ones have ended.
            replica.loaded.discard(name)
            if not replica.running[name] and await _succeeds(replica, name, replica.client.unload_adapter(name)):
                engine_adapters.discard(name)

    async def _load(self, replica: Replica, engine_adapters: set[str]) -> None:
        for name, path in self.adapters.items():
            if name not in engine_adapters:
                # Never more than the engine's slots, the one being loaded included: otherwise vLLM gives away the slot
                # of an adapter that a running request uses, and that request continues with other weights (vLLM issue
                # 47724).
                if len(engine_adapters) >= self.max_adapters:
                    names = ", ".join(sorted(engine_adapters))
                    log.warning("engine %s is full: %s waits for one of %s", replica.url, name, names)
                    continue
                if not await _succeeds(replica, name, replica.client.load_adapter(name, path)):
                    continue
                engine_adapters.add(name)
            replica.loaded.add(name)


async def _apply_sleep(replica: Replica) -> bool:
    """Put the engine to sleep or wake it; returns whether it is awake and should be."""
    reason = replica.sleep_reason
    if reason is None:
        # Somebody else put it to sleep and may wake it, so it is queried again.
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
        # The request may have taken effect all the same, so the state is queried before the engine takes requests.
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
    """Rendezvous hashing: a conversation keeps its engine whichever other engines come and go."""
    return int.from_bytes(hashlib.blake2b(f"{url} {conversation_id}".encode(), digest_size=8).digest())
