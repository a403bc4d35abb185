"""The pool of engines behind the gateway: health, loaded adapters, sleep, and the choice of an engine for a request.

Invariants: an engine gets requests for an adapter only after it has confirmed loading it, and the adapter is unloaded
only after its last request there has ended, of this router and, by the engine's report, of all others
(``EngineClient.adapters_in_use``). Of the router's adapters an engine never holds more than ``max_adapters``
at once; the router loads none into an engine whose slots are taken, by trainings for instance. A sleeping engine gets
no requests. An engine that fails ``/health`` gets no requests until it answers again; its adapters are then loaded
again. An engine that fails requests although it looks healthy gets none while its circuit is open
(``circuit_breaker``), unless no other engine can answer. Engines join and leave while requests run: one that leaves
gets no new requests and is dropped when those that run there have ended; its adapters stay loaded, because other
routers may still use them. Not covered: starting engines.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from traced.gateway.circuit_breaker import Attempt, CircuitBreaker
from traced.gateway.upstream import ConnectionLost, EngineUnavailable, EngineUnreachable
from traced.inference.client import BASE, EngineClient
from traced.inference.errors import RequestError, ServingError
from traced.routing.preflight import EnginePreflight, check_engine

POLL_S = 0.5
HEALTH_S = 5.0
# The lease of a training is known to the router after this time.
LEASE_S = 2 * POLL_S
# Every router on the store knows of a promotion or a rollback after this time, and sends no more requests for an
# adapter that is not required any more.
NOTICE_S = 1.0
# Longer than a request lasts. For this time an adapter stays loaded at an engine that does not report whether requests
# of other routers run with it.
UNREPORTED_S = 1800.0
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
        adapter_errors: Why adapters could not be loaded or unloaded, by their names.
        waiting: The adapters that wait for a slot.
        retired: Adapters to unload, with the monotonic second since which they are not required.
        preflight: What the engine offers for routing; None until it was asked.
        running: The number of running requests by model.
        problem: Why the engine gets no requests, in words; "" if it is healthy.
        sleep_reason: Why the engine may sleep; "" if it must be awake, None if this router never wakes it.
        asleep_since: Monotonic second since which the engine sleeps; None if it is awake.
        requested_at: Monotonic second since which requests wait for the sleeping engine; None if none does.
        wake_error: Why the engine could not be woken up; "" if it could.
        wake_event: Set it to have the engine checked at once.
        wake_s: Seconds that the last wake-up took.
        leaving: Whether the engine gets no new requests, because it is dropped when its running ones have ended.
    """

    client: EngineClient
    healthy: bool = False
    loaded: set[str] = field(default_factory=set)
    adapter_errors: dict[str, str] = field(default_factory=dict)
    waiting: set[str] = field(default_factory=set)
    retired: dict[str, float] = field(default_factory=dict)
    preflight: EnginePreflight | None = None
    running: Counter[str] = field(default_factory=Counter)
    problem: str = "not checked yet"
    sleep_reason: str | None = None
    asleep_since: float | None = None
    requested_at: float | None = None
    wake_error: str = ""
    wake_event: asyncio.Event = field(default_factory=asyncio.Event)
    wake_s: float = 0.0
    leaving: bool = False
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)

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
        return self.healthy and not self.leaving and (model == BASE or model in self.loaded)

    @property
    def status(self) -> str:
        """Return "ok", or why the engine gets fewer requests or none."""
        if self.leaving:
            return f"leaving: {self.busy} requests run"
        return (self.breaker.problem or "ok") if self.healthy else self.problem

    def upstream(self, model: str) -> str:
        """Return the engine's own name for ``model``."""
        return self.client.base if model == BASE else model

    @contextlib.contextmanager
    def request(self, model: str) -> Iterator[Attempt]:
        """Count a running request for ``model`` while the context is active, and its failure by the engine."""
        self.running[model] += 1
        attempt = self.breaker.begin()
        try:
            yield attempt
        except (EngineUnreachable, ConnectionLost, EngineUnavailable):
            self.note_failure(attempt)
            raise
        finally:
            self.running[model] -= 1
            attempt.note_response()

    def note_failure(self, attempt: Attempt) -> None:
        """Count a failed request, and have the engine checked at once: it may be gone."""
        state = self.breaker.state
        attempt.fail()
        if self.breaker.state != state:
            log.warning("engine %s: %s", self.url, self.breaker.problem)
        self.wake_event.set()

    def mark_failed(self, reason: str) -> None:
        """Mark the engine as unavailable, so that it gets no requests until a check succeeds."""
        if self.healthy:
            log.warning("engine %s is not available: %s", self.url, reason)
        self.healthy, self.problem = False, reason
        # The engine may have been restarted and have lost its adapters, or be another one.
        self.loaded.clear()
        self.preflight = None


@dataclass
class Pool:
    """All engines behind the gateway.

    Args:
        max_adapters: The number of the router's adapters that each engine holds at most.
        slots: The number of adapters that each engine holds at most, with those of others; 0: ``max_adapters``.
        adapters: The adapter versions that should be loaded, with their directories.
        check_adapter: Raises ``ModelError`` for the folder of an adapter of another base model.
        verify_adapter: Raises ``ServingError`` for a folder whose files are not those of the version, and returns a
            function that does so after an engine has loaded them.
        wake_after_s: Seconds that requests wait at most for an engine that a training has put to sleep.
        wakes_under_lease: Whether an engine can be woken while the training holds its GPU; if not, the GPU is requested
            back, and the engine is woken once the lease has ended.
        base: The engines' name for the base model; "": the first one that each of them lists.
        has_peers: Returns whether other routers may use the engines.
    """

    replicas: list[Replica]
    max_adapters: int
    adapters: Mapping[str, Path] = field(default_factory=dict)
    check_adapter: Callable[[Path], None] = lambda path: None
    verify_adapter: Callable[[Path], Callable[[], None]] = lambda path: lambda: None
    slots: int = 0
    wake_after_s: float = 5.0
    wakes_under_lease: bool = True
    base: str = ""
    has_peers: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def pick(self, model: str, conversation_id: str, excluded_urls: Container[str] = ()) -> Replica | None:
        """Return the engine for a request, or None if no engine outside ``excluded_urls`` serves the model."""
        serving = [replica for replica in self.replicas if replica.serves(model)]
        if not serving:
            self._note_waiting_request()
        serving = [replica for replica in serving if replica.url not in excluded_urls]
        # A request is better sent to an engine whose circuit is open than refused.
        serving = [replica for replica in serving if replica.breaker.allows_request] or serving
        if not serving:
            return None
        if len(serving) == 1:
            return serving[0]
        preferred = max(serving, key=lambda replica: _weight(replica.url, conversation_id))
        least_busy = min(serving, key=lambda replica: replica.busy)
        return preferred if preferred.busy <= least_busy.busy + AFFINITY else least_busy

    def _note_waiting_request(self) -> None:
        for replica in self.replicas:
            if replica.asleep_since is not None and replica.requested_at is None:
                replica.requested_at = self.clock()

    @property
    def wake_errors(self) -> list[str]:
        """Return why engines that must be awake could not be woken up."""
        return [replica.wake_error for replica in self.replicas if replica.wake_error]

    def set_engines(self, urls: Collection[str], connect: Callable[[str], Replica]) -> None:
        """Use the engines at these URLs.

        Others get no new requests, and are dropped when their running ones have ended.

        Args:
            connect: Returns the replica for the URL of a new engine, which gets requests once a check has succeeded.
        """
        replicas = {replica.url: replica for replica in self.replicas}
        for url, replica in replicas.items():
            is_leaving = url not in urls
            if is_leaving != replica.leaving:
                log.info("engine %s %s, %d requests run", url, "leaves" if is_leaving else "stays", replica.busy)
                replica.leaving = is_leaving
                replica.adapter_errors.clear()
                replica.wake_event.set()
        for url in urls:
            if url not in replicas:
                log.info("engine %s joins", url)
                self.replicas.append(connect(url))
        self._changed.set()

    def serves(self, model: str) -> bool:
        """Return whether any engine serves the model."""
        return any(replica.serves(model) for replica in self.replicas)

    def refuses(self, adapter: str) -> bool:
        """Return whether an engine could not load the adapter."""
        return any(adapter in replica.adapter_errors for replica in self.replicas)

    def set_adapters(self, adapters: Mapping[str, Path]) -> None:
        """Set the adapters that should be loaded, and have the engines checked at once."""
        self.adapters = adapters
        for replica in self.replicas:
            replica.adapter_errors = {
                name: reason for name, reason in replica.adapter_errors.items() if name in adapters
            }
            replica.waiting &= adapters.keys()
            replica.wake_event.set()

    def set_sleep_reason(self, reason: str) -> None:
        """Let a training put the engines to sleep for this reason; if it is "", sleeping engines are woken up."""
        for replica in self.replicas:
            if replica.sleep_reason != reason:
                replica.sleep_reason = reason
                replica.wake_event.set()

    async def run(self) -> None:
        """Check the engines until cancelled."""
        watched_replicas: list[Replica] = []
        # One task per engine, so that an engine that hangs delays no other.
        async with asyncio.TaskGroup() as group:
            while True:
                for replica in self.replicas:
                    if not any(replica is other for other in watched_replicas):
                        group.create_task(self._run_checks(replica))
                watched_replicas = list(self.replicas)
                self._changed.clear()
                await self._changed.wait()

    async def _run_checks(self, replica: Replica) -> None:
        """Check an engine until it has left."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await replica.wake_event.wait()
            replica.wake_event.clear()
            if replica.leaving and not replica.busy:
                break
            await self._check(replica)
        # Nothing is awaited between the test and this line, so the engine gets no request in between.
        self.replicas = [other for other in self.replicas if other is not replica]
        log.info("engine %s has left", replica.url)
        await replica.client.aclose()

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
                bases, adapters = await replica.client.bases_and_adapters()
                # At every check, because a training puts the engine to sleep and wakes it up.
                is_sleeping = await replica.client.is_sleeping()
        except (ServingError, TimeoutError) as error:
            return replica.mark_failed(str(error) or "it does not answer within five seconds")
        base = self.base or next(iter(bases), "")
        if base not in bases:
            names = ", ".join(bases) or "none"
            return replica.mark_failed(f"it does not list the base model {base!r} (engine.model), but {names}")
        if is_sleeping and not await self._wake(replica):
            return None
        replica.asleep_since, replica.requested_at, replica.wake_error = None, None, ""
        if replica.preflight is None:
            replica.client.base = base
            replica.preflight = await _preflight(replica)
        if not replica.healthy:
            log.info("engine %s is available", replica.url)
        replica.client.base, replica.healthy, replica.problem = base, True, ""
        engine_adapters = set(adapters)
        replica.loaded &= engine_adapters
        await self._unload(replica, engine_adapters)
        if not replica.leaving:
            await self._load(replica, engine_adapters)
        # Another router may have done what this one could not do.
        replica.adapter_errors = {
            name: reason
            for name, reason in replica.adapter_errors.items()
            if (name in self.adapters) is not (name in engine_adapters)
        }
        return None

    async def _wake(self, replica: Replica) -> bool:
        """Wake up a sleeping engine unless it may go on sleeping; return whether it is awake."""
        replica.healthy = False
        if replica.asleep_since is None:
            replica.asleep_since = self.clock()
        if replica.sleep_reason is None:
            replica.problem = "asleep; traced wakes it only if serving.sleep_for_training is set"
            return False
        replica.problem = f"asleep: {replica.sleep_reason or 'it is being woken up'}"
        try:
            if await replica.client.is_draining():
                return False
            if replica.busy:
                # They were sent before the sleep was noticed, and wait inside of the engine.
                self._note_waiting_request()
            if not self._must_wake(replica):
                return False
            started = self.clock()
            await replica.client.wake_up()
            replica.wake_s = self.clock() - started
        except ServingError as error:
            replica.wake_error = replica.problem = f"asleep, and it cannot be woken up: {error}"
            log.warning("engine %s: %s", replica.url, replica.problem)
            return False
        log.info("engine %s was woken up: %s", replica.url, "requests wait" if replica.sleep_reason else "no training")
        return True

    def _must_wake(self, replica: Replica) -> bool:
        """Return whether no training lets the engine sleep, or requests cannot wait until the next check."""
        if not replica.sleep_reason and replica.asleep_since is not None:
            # The lease of a training that has just begun may not have been read yet.
            return self.clock() - replica.asleep_since >= LEASE_S
        if replica.requested_at is None:
            return False
        # Waking takes its time as well, seconds for a large model.
        is_due = self.clock() - replica.requested_at + POLL_S + replica.wake_s >= self.wake_after_s
        if is_due and not self.wakes_under_lease:
            replica.wake_error = replica.problem = f"asleep: {replica.sleep_reason}, which is requested back"
            return False
        return is_due

    async def _unload(self, replica: Replica, engine_adapters: set[str]) -> None:
        names = {name for name in engine_adapters - set(self.adapters) if ADAPTER_NAME.fullmatch(name)}
        # New requests stop at once; an adapter is unloaded when its running requests have ended.
        replica.loaded -= names
        now = self.clock()
        replica.retired = {name: replica.retired.get(name, now) for name in names}
        unused = {name for name in names if not replica.running[name]}
        if unused and self.has_peers():
            unused = await self._unused_by_peers(replica, unused)
        for name in sorted(unused):
            # It may be required again since the engine was asked.
            if name not in self.adapters and await _is_set(replica, name, replica.client.unload_adapter(name), False):
                engine_adapters.discard(name)

    async def _unused_by_peers(self, replica: Replica, names: set[str]) -> set[str]:
        """Return those of the adapters with which no request of another router runs.

        After an unload vLLM completes the running requests, but the next load may reuse the slot of their adapter
        (vLLM issue 47724).
        """
        retired_for_s = {name: self.clock() - replica.retired[name] for name in names}
        names = {name for name in names if retired_for_s[name] >= NOTICE_S}
        if not names:
            return names
        used: set[str] | None = None
        # An engine whose queue is long answers at a later check.
        with contextlib.suppress(ServingError, TimeoutError):
            async with asyncio.timeout(HEALTH_S):
                used = await replica.client.adapters_in_use(names)
        return {name for name in names if retired_for_s[name] >= UNREPORTED_S} if used is None else names - used

    async def _load(self, replica: Replica, engine_adapters: set[str]) -> None:
        for name, path in self.adapters.items():
            if name not in engine_adapters and self.has_peers():
                # Another router may have loaded adapters since the engine was asked.
                engine_adapters |= await _listed_adapters(replica) or set()
            if name not in engine_adapters:
                # Never load more adapters than the engine has slots: otherwise vLLM reassigns the slot of an adapter
                # that a running request uses, and that request continues with other weights (vLLM issue 47724).
                count = sum(ADAPTER_NAME.fullmatch(other) is not None for other in engine_adapters)
                if count >= self.max_adapters or len(engine_adapters) >= max(self.slots, self.max_adapters):
                    if name not in replica.waiting:
                        names = ", ".join(sorted(engine_adapters))
                        log.warning("engine %s is full: %s waits for one of %s", replica.url, name, names)
                    replica.waiting.add(name)
                    continue
                if not await _is_set(replica, name, self._load_checked(replica, name, path), True):
                    continue
                engine_adapters.add(name)
            replica.loaded.add(name)
        replica.waiting -= replica.loaded

    async def _load_checked(self, replica: Replica, name: str, path: Path) -> None:
        await asyncio.to_thread(self.check_adapter, path)
        verify_loaded = await asyncio.to_thread(self.verify_adapter, path)
        await replica.client.load_adapter(name, path)
        try:
            # The engine may have read other bytes than were verified before.
            await asyncio.to_thread(verify_loaded)
        except ServingError:
            await replica.client.unload_adapter(name)
            raise


async def _preflight(replica: Replica) -> EnginePreflight | None:
    """Return what the engine offers for routing, or None if it cannot say at the moment: the next check asks again."""
    try:
        async with asyncio.timeout(HEALTH_S):
            return await check_engine(replica.client)
    except (ServingError, TimeoutError) as error:
        log.warning("engine %s, preflight of routing: %s", replica.url, error or "no answer within five seconds")
        return None


async def _is_set(replica: Replica, name: str, call: Coroutine[object, None, None], is_loaded: bool) -> bool:
    """Await a call that loads or unloads an adapter; return whether the engine's state is then ``is_loaded``."""
    try:
        await call
    except ServingError as error:
        # If another router was first, vLLM refuses the call with status 400 or 404.
        if isinstance(error, RequestError):
            adapters = await _listed_adapters(replica)
            if adapters is not None and (name in adapters) is is_loaded:
                return True
        # Each check tries again, so an error is logged once.
        if replica.adapter_errors.get(name) != str(error):
            log.warning("engine %s, adapter %s: %s", replica.url, name, error)
        replica.adapter_errors[name] = str(error)
        return False
    return True


async def _listed_adapters(replica: Replica) -> set[str] | None:
    """Return the adapters that the engine lists; None if it does not answer."""
    try:
        return set((await replica.client.bases_and_adapters())[1])
    except ServingError:
        return None


def _weight(url: str, conversation_id: str) -> int:
    """Return the engine's weight for rendezvous hashing, which keeps a conversation's engine while others change."""
    return int.from_bytes(hashlib.blake2b(f"{url} {conversation_id}".encode(), digest_size=8).digest())
