"""The engines behind the router: which are well, what each has loaded, and which one takes a request.

Invariants: an adapter version takes requests at an engine only after that engine has confirmed its loading; it is
unloaded only when its last request there has ended; an engine never holds more than ``max_adapters`` at once, the one
being loaded among them. The last keeps vLLM from giving a slot away that a running request decodes with (its issue
47724: such a request went on with another adapter's weights). Requests of a conversation go to the same engine, for
its prefix cache, unless that one has clearly more to do than another.
An engine that should rest (``Pool.rest``) takes no new requests, sleeps when its last has ended, and is woken before it
takes the next. One that is new here or had failed is asked first whether it sleeps; it is woken only after ``rest`` has
said that it may be.
How it fails: an engine that refuses connections or fails ``/health`` takes no requests until it answers again; then
it gets its adapters anew, because it may have been started anew. An adapter that an engine cannot load is tried again.
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
from typing import Any

from traced.inference.client import BASE, EngineClient
from traced.inference.errors import ServingError

LOOK_S = 0.5
HEALTH_S = 5.0
OURS = re.compile(r".+@v\d+")  # an adapter version's name
AFFINITY = 4  # requests that the conversation's own engine may have more than the least busy one
log = logging.getLogger(__name__)


@dataclass
class Replica:
    """One engine. ``running`` counts the requests at it by model; ``loaded`` are the adapters that it has confirmed.

    ``resting`` says why it should take no requests and sleep ("": it should be awake; None: nobody said either);
    ``asleep`` whether it does (None: it has to be asked).
    """

    client: EngineClient
    well: bool = False
    loaded: set[str] = field(default_factory=set)
    running: Counter[str] = field(default_factory=Counter)
    trouble: str = "not asked yet"
    resting: str | None = None
    asleep: bool | None = None
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Its address."""
        return self.client.url

    @property
    def busy(self) -> int:
        """Requests at it now."""
        return self.running.total()

    def serves(self, model: str) -> bool:
        """Whether a request for ``model`` may go to it."""
        return self.well and not self.resting and (model == BASE or model in self.loaded)

    def upstream(self, model: str) -> str:
        """What it calls ``model``."""
        return self.client.base if model == BASE else model

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[None]:
        """A request for ``model`` is at the engine."""
        self.running[model] += 1
        try:
            yield
        finally:
            self.running[model] -= 1

    def failed(self, why: str) -> None:
        """It did not answer: no more requests until it does."""
        if self.well:
            log.warning("engine %s takes no requests: %s", self.url, why)
        self.well, self.trouble, self.asleep = False, why, None
        self.loaded.clear()


@dataclass
class Pool:
    """All engines; ``wanted`` maps the adapter versions that should be loaded to their directories."""

    replicas: list[Replica]
    max_adapters: int
    wanted: Mapping[str, Path] = field(default_factory=dict)

    def pick(self, model: str, conversation_id: str) -> Replica | None:
        """The engine for a request, None when none serves the model."""
        serving = [replica for replica in self.replicas if replica.serves(model)]
        if not serving:
            return None
        if len(serving) == 1:
            return serving[0]
        own = max(serving, key=lambda replica: _weight(replica.url, conversation_id))
        least = min(serving, key=lambda replica: replica.busy)
        return own if own.busy <= least.busy + AFFINITY else least

    def serves(self, model: str) -> bool:
        """Whether any engine does."""
        return any(replica.serves(model) for replica in self.replicas)

    def want(self, adapters: Mapping[str, Path]) -> None:
        """From now on these should be loaded; whoever looks after the engines hears of it at once."""
        self.wanted = adapters
        for replica in self.replicas:
            replica.woken.set()

    def rest(self, why: str) -> None:
        """From now on the engines should sleep, or be awake where nothing is said against it."""
        for replica in self.replicas:
            if replica.resting != why:
                replica.resting = why
                replica.woken.set()

    async def keep(self) -> None:
        """Look after the engines until cancelled: after each for itself, so that one that hangs holds up no other."""
        async with asyncio.TaskGroup() as group:
            for replica in self.replicas:
                group.create_task(self._keep(replica))

    async def _keep(self, replica: Replica) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await replica.woken.wait()
            replica.woken.clear()
            await self._look_at(replica)

    async def look(self) -> None:
        """Ask every engine how it is and bring its adapters to what is wanted; not while ``keep`` runs."""
        await asyncio.gather(*(self._look_at(replica) for replica in self.replicas))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(replica.client.aclose() for replica in self.replicas))

    async def _look_at(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(HEALTH_S):
                if not await replica.client.health():
                    return replica.failed("it does not answer /health")
                named = await replica.client.models()
                if replica.asleep is None:
                    replica.asleep = await replica.client.is_sleeping()
        except (ServingError, TimeoutError) as error:
            return replica.failed(str(error) or "it does not answer within five seconds")
        if not named:
            return replica.failed("it names no model")
        if (replica.resting or replica.asleep) and not await _rested(replica):
            return None
        if not replica.well:
            log.info("engine %s takes requests", replica.url)
        replica.client.base, replica.well, replica.trouble = named[0], True, ""
        replica.loaded &= set(named)
        there = set(named[1:])
        await self._unload(replica, there)
        await self._load(replica, there)
        return None

    async def _unload(self, replica: Replica, named: set[str]) -> None:
        for name in sorted(named - set(self.wanted)):
            if not OURS.fullmatch(name):
                continue  # somebody else's adapter
            replica.loaded.discard(name)  # from here on no request begins
            if not replica.running[name] and await _done(replica, name, replica.client.unload_adapter(name)):
                named.discard(name)

    async def _load(self, replica: Replica, named: set[str]) -> None:
        for name, path in self.wanted.items():
            if name not in named:
                if len(named) >= self.max_adapters:
                    log.warning(
                        "engine %s is full: %s waits for one of %s", replica.url, name, ", ".join(sorted(named))
                    )
                    continue
                if not await _done(replica, name, replica.client.load_adapter(name, path)):
                    continue
                named.add(name)
            replica.loaded.add(name)


async def _rested(replica: Replica) -> bool:
    """Let it sleep or wake it, as it should; whether it is awake and should be."""
    told = replica.resting
    if told is None:
        replica.well, replica.asleep = False, None  # who put it to sleep may wake it, so it is asked again
        replica.trouble = "asleep; it is woken here only with serving.sleep_for_training"
        return False
    try:
        if not told:
            await replica.client.wake_up()
            replica.asleep = False
            return True
        if not replica.asleep and not replica.busy:
            await replica.client.sleep()
            replica.asleep = True
            log.info("engine %s sleeps: %s", replica.url, told)
    except ServingError as error:
        replica.asleep = None  # it may have heard all the same, and is asked before it takes requests
        told = f"it can be neither put to sleep nor woken: {error}"
        log.warning("engine %s: %s", replica.url, told)
    replica.well, replica.trouble = False, f"asleep: {told}" if replica.asleep else told
    return False


async def _done(replica: Replica, name: str, call: Coroutine[Any, Any, None]) -> bool:
    try:
        await call
    except ServingError as error:
        log.warning("engine %s, adapter %s: %s", replica.url, name, error)
        return False
    return True


def _weight(url: str, conversation_id: str) -> int:
    """Rendezvous hashing: the same engine for a conversation whichever others come and go."""
    return int.from_bytes(hashlib.blake2b(f"{url} {conversation_id}".encode(), digest_size=8).digest())
