"""Choose the model for a conversation: follow the live versions in the store, split trials, store routing decisions.

Invariants:
- A version that is rolled back gets no new request from the next poll on (``POLL_S``), before it is unloaded. Its
  conversations continue with the capability's live version or the base model.
- A conversation is routed once. The decision is stored, so it is the same at every gateway and after a restart.
- A conversation that began before any version was live stays with the base model.
- While the store does not answer, the gateway uses the last known state, and a decision that could not be stored is
  valid in this process only.
"""

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from sqlalchemy import Engine

from sandbox.contract import Message, Task
from store.database import read_session, write_session
from store.errors import StoreError
from store.records import ConversationRoute, PromotionEntry, PromotionState, RouterKey
from store.repositories.adapters import cycles_with_adapters
from store.repositories.promotions import last_promotion, live_adapters, trials
from store.repositories.serving import find_routes, list_keys, save_routes
from store.types import opening_messages
from traced.gateway.access import KeyRing
from traced.gateway.engines import Pool
from traced.inference.client import BASE
from traced.inference.errors import RouterFileError
from traced.ingest.conversations import history_length
from traced.routing.router_files import capability_of, classifier_file, modification_times, uncovered_versions
from traced.routing.routers import (
    HiddenStateClassifier,
    HiddenStateRouter,
    LabelRouter,
    Route,
    Router,
    RoutingDecision,
    adapter_capability,
    adapter_route,
    read_classifier,
)

POLL_S = 0.2
# Maximum number of conversations whose decision is cached.
CACHE_SIZE = 50_000
Q = TypeVar("Q")
A = TypeVar("A")
log = logging.getLogger(__name__)


@dataclass
class Batcher(Generic[Q, A]):
    """Batches many small queries to the store: queries that arrive during one call are sent with the next call.

    Invariants: one call runs at a time, and a query waits only while another call runs. An error is raised to every
    caller of the batch. A query is sent even if its caller has been cancelled.

    Args:
        call: The function that is run on a thread; it returns the answers to its queries in order.
        max_batch: Maximum number of queries in one call.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    max_batch: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None

    async def ask(self, query: Q) -> A:
        """Queue one query and return its answer; raises what ``call`` raises."""
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
            try:
                answers = await asyncio.to_thread(self.call, [query for query, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


@dataclass(frozen=True)
class LiveVersions:
    """The adapter versions that are live or on trial, as of one entry of the promotion log.

    Args:
        seq: The sequence number of the log entry.
        routes: The versions that a router chooses among, with their lines in the routing prompt: the live version of
            each capability, or the version on trial if none is live.
        paths: The directories of all versions that engines should load.
        versions: The live version of each capability.
        trials: The trial of each capability.
        classifier: The fitted router; None if none covers all ``routes``.
        classifier_files: The files that may hold a fitted router, newest first.
        file_times: The modification times of these files when they were read.
    """

    seq: int = -1
    routes: dict[str, Route] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    trials: dict[str, PromotionEntry] = field(default_factory=dict)
    classifier: HiddenStateClassifier | None = None
    classifier_files: tuple[Path, ...] = ()
    file_times: tuple[int, ...] = ()

    def current_model(self, model: str) -> str:
        """Return the model that now serves a conversation routed to ``model``.

        This is ``model`` itself while it is live or on trial, else its capability's live version or the base model.
        """
        if model == BASE or model in self.paths:
            return model
        return self.versions.get(capability_of(model), BASE)

    def assign(self, model: str, conversation_id: str, serves: Callable[[str], bool]) -> tuple[str, int | None]:
        """Return the model for a conversation routed to ``model``, and the log entry of its trial (None without one).

        A trial splits the conversations of its capability between the version on trial and its control.
        """
        trial = self.trials.get(capability_of(model))
        if trial is None:
            return model, None
        control, challenger = self.versions.get(trial.capability, BASE), trial.promotion.adapter
        # If the challenger cannot be served, the conversation must not count for the trial's control either.
        if not serves(challenger):
            return control, None
        share = trial.promotion.share or 0.0
        return (challenger if _trial_position(challenger, conversation_id) < share else control), trial.seq

    def shadow_version(self, trial_seq: int | None) -> str | None:
        """Return the version that shadows the conversations of a trial, or None if this is no current shadow trial."""
        shadows = (trial for trial in self.trials.values() if trial.promotion.state is PromotionState.SHADOW)
        return next((trial.promotion.adapter for trial in shadows if trial.seq == trial_seq), None)


@dataclass
class PromotionFollower:
    """Keeps ``live``, the API keys and the pool's adapters up to date with the store."""

    store: Engine
    pool: Pool
    data_dir: Path
    live: LiveVersions = field(default_factory=LiveVersions)
    keys: KeyRing = field(default_factory=KeyRing)

    async def run(self) -> None:
        """Poll the store until cancelled; while it does not answer, keep the last state."""
        last_error = ""
        while True:
            try:
                await self.refresh()
                last_error = ""
            except StoreError as error:
                if last_error != str(error):
                    last_error = str(error)
                    log.warning("the store does not answer, the live versions are not updated: %s", last_error)
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Read the store once and apply what has changed; raises ``StoreError``."""
        live = await asyncio.to_thread(self._read)
        if live is not None:
            self.live = live
            self.pool.set_adapters(live.paths)
            router = "a fitted router" if live.classifier is not None else "label tokens"
            log.info("live: %s; routed by %s", ", ".join(live.versions.values()) or "the base model alone", router)
            for trial in live.trials.values():
                share = "" if trial.promotion.share is None else f", {100 * trial.promotion.share:g} %"
                log.info("on trial: %s (%s%s)", trial.promotion.adapter, trial.promotion.state, share)

    def _read(self) -> LiveVersions | None:
        """Return the live versions, or None if nothing has changed."""
        with read_session(self.store) as session:
            self.keys.by_hash = _valid_keys(list_keys(session))
            seq = last_promotion(session)
            if seq == self.live.seq and modification_times(self.live.classifier_files) == self.live.file_times:
                return None
            trials_by_capability = {trial.capability: trial for trial in trials(session)}
            live_names = [promotion.adapter for promotion in live_adapters(session)]
            records = {name: adapter_capability(session, name)[0] for name in live_names}
            versions = {record.capability: name for name, record in records.items()}
            trial_names = [trial.promotion.adapter for trial in trials_by_capability.values()]
            records |= {name: adapter_capability(session, name)[0] for name in trial_names}
            # In the routing prompt a trial's control represents the capability; conversations routed to it are split
            # between control and challenger afterwards.
            challengers = {
                trial.promotion.adapter for capability, trial in trials_by_capability.items() if capability in versions
            }
            routes = {name: adapter_route(session, name) for name in records if name not in challengers}
            cycles = cycles_with_adapters(session)
        paths = {name: Path(record.path) for name, record in records.items()}
        files = tuple(classifier_file(self.data_dir, cycle_id) for cycle_id in cycles) if routes else ()
        # The times are read before the files, so that a file written meanwhile is read again at the next refresh.
        file_times = modification_times(files)
        classifier = _classifier(files, {capability_of(name): name for name in routes})
        return LiveVersions(seq, routes, paths, versions, trials_by_capability, classifier, files, file_times)


@dataclass
class ConversationRouter:
    """Routes each conversation once, at its first request.

    Args:
        timeout_s: Seconds that routing may take; after that the base model serves the conversation.
        use_label_tokens: Whether to route by label tokens even if a fitted classifier exists.
    """

    store: Engine
    pool: Pool
    live: Callable[[], LiveVersions]
    now: Callable[[], datetime]
    timeout_s: float
    use_label_tokens: bool
    _decisions: "OrderedDict[str, asyncio.Task[ConversationRoute]]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._find_batcher = Batcher(self._find)
        self._save_batcher = Batcher(self._save)

    async def decide(self, conversation_id: str, messages: Sequence[Message]) -> ConversationRoute:
        """Return the conversation's routing decision; ``messages`` are those of the current request."""
        decision = self._decisions.get(conversation_id)
        # This decision is not stored: the messages of the next request show that the conversation has already begun.
        if decision is None and not self.live().routes:
            return ConversationRoute(conversation_id, BASE, {}, 0.0, "no adapter is live", self.now())
        if decision is None or decision.cancelled():
            decision = asyncio.create_task(self._decide(conversation_id, messages))
            self._decisions[conversation_id] = decision
            if len(self._decisions) > CACHE_SIZE:
                self._decisions.popitem(last=False)
        else:
            self._decisions.move_to_end(conversation_id)
        # Shielded, because several requests of the conversation may wait for the same decision.
        return await asyncio.shield(decision)

    async def _decide(self, conversation_id: str, messages: Sequence[Message]) -> ConversationRoute:
        started = time.perf_counter()
        live = self.live()
        try:
            if (stored_route := await self._find_batcher.ask(conversation_id)) is not None:
                return stored_route
        except StoreError as error:
            log.warning("the routing decision on %s cannot be read: %s", conversation_id, error)
        if history_length(messages):
            decision = RoutingDecision(BASE, {}, 0.0, "the conversation started before routing was active")
        else:
            decision = await self._choose(conversation_id, messages, live)
        seconds = time.perf_counter() - started
        model, trial = live.assign(decision.model, conversation_id, self.pool.serves)
        route = ConversationRoute(
            conversation_id, model, decision.logprobs, seconds, decision.reason, self.now(), trial
        )
        # Without an engine the request fails, so the conversation is routed again at its next request.
        if not self.pool.serves(BASE):
            self._decisions.pop(conversation_id, None)
            return route
        try:
            return await self._save_batcher.ask(route)
        except StoreError as error:
            log.warning("the routing decision on %s cannot be stored: %s", conversation_id, error)
            return route

    async def _choose(self, conversation_id: str, messages: Sequence[Message], live: LiveVersions) -> RoutingDecision:
        replica = self.pool.pick(BASE, conversation_id)
        if replica is None:
            return RoutingDecision(BASE, {}, 0.0, "no engine answers")
        routes = [route for name, route in live.routes.items() if self.pool.serves(name)]
        router: Router = LabelRouter(replica.client, routes)
        if live.classifier is not None and not self.use_label_tokens:
            router = HiddenStateRouter(replica.client, live.classifier)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await router.choose(Task("", [dict(message) for message in opening_messages(messages)], []))
        except TimeoutError:
            return RoutingDecision(BASE, {}, self.timeout_s, f"no decision within {self.timeout_s:g} s")
        except Exception as error:
            # A defect in routing must not make the request fail.
            log.exception("routing of %s failed", conversation_id)
            return RoutingDecision(BASE, {}, 0.0, f"a defect of traced: {type(error).__name__}")

    def _find(self, conversation_ids: Sequence[str]) -> list[ConversationRoute | None]:
        with read_session(self.store) as session:
            routes = find_routes(session, conversation_ids)
        return [routes.get(conversation_id) for conversation_id in conversation_ids]

    def _save(self, routes: Sequence[ConversationRoute]) -> list[ConversationRoute]:
        """Store the routes and return the stored ones: those of another gateway where it was faster."""
        with write_session(self.store) as session:
            stored_routes = save_routes(session, routes)
        return [stored_routes[route.id] for route in routes]


def _trial_position(challenger: str, conversation_id: str) -> float:
    """Return a conversation's position in [0, 1) in a trial; it depends on ids only, so that all gateways agree."""
    # The challenger's name is included, so that the next trial splits the conversations differently.
    text = f"{challenger} {conversation_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64


def _valid_keys(keys: list[RouterKey]) -> dict[str, RouterKey] | None:
    return {key.hash: key for key in keys if key.revoked_at is None} if keys else None


def _classifier(files: Sequence[Path], versions: Mapping[str, str]) -> HiddenStateClassifier | None:
    """Return the newest fitted router that covers every capability, its classes renamed to the current versions.

    Returns None if there is none.
    """
    for path in files:
        try:
            classifier = read_classifier(path)
        except RouterFileError:
            continue
        # A class without a current version keeps its name; ``LiveVersions.current_model`` maps it to the base model.
        if not uncovered_versions(classifier.examples, versions.values()):
            classes = [versions.get(capability_of(model), model) for model in classifier.classes]
            return replace(classifier, classes=classes)
    return None
