"""The choice of the model for a conversation: the live versions followed from the store, trials, and stored decisions.

Invariants: a version that is rolled back takes no new request from the next poll (``POLL_S``) on, before it is
unloaded; its conversations continue with the capability's live version or the base model. A conversation is routed
once; the decision is stored and the same at every gateway and after a restart. A conversation that had begun before
anything was live stays with the base model. While the store does not answer, the gateway continues with the last state,
and a decision that could not be stored holds in this process.
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
# Conversations whose decision is cached.
CACHE_SIZE = 50_000
Q = TypeVar("Q")
A = TypeVar("A")
log = logging.getLogger(__name__)


@dataclass
class Batcher(Generic[Q, A]):
    """Batches many small queries to the store: queries that arrive during one call go into the next.

    Invariants: one call runs at a time, and a single query is never delayed. An error is raised to every caller of the
    batch. A query whose caller is cancelled is made all the same.

    Args:
        call: Runs on a thread; returns the answers to its queries in order.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    max_batch: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None

    async def ask(self, query: Q) -> A:
        """Return the answer to one query."""
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
    """The versions that are live or on trial, as of one entry of the promotion log.

    Args:
        seq: The log entry.
        routes: The versions to choose among, with their lines in the routing prompt: of each capability the live one,
            or the one on trial if none is live.
        paths: All versions that engines should load.
        versions: The live version of each capability.
        trials: The trial of each capability.
        classifier_files: Where routers for the live adapters may be, newest first.
        file_times: Their modification times when they were read.
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
        """Return what serves a conversation that was routed to ``model`` now: it, its successor or the base model."""
        if model == BASE or model in self.paths:
            return model
        return self.versions.get(capability_of(model), BASE)

    def assign(self, model: str, conversation_id: str, serves: Callable[[str], bool]) -> tuple[str, int | None]:
        """Return the model for a conversation routed to ``model``, and the trial that it takes part in."""
        trial = self.trials.get(capability_of(model))
        if trial is None:
            return model, None
        control, challenger = self.versions.get(trial.capability, BASE), trial.promotion.adapter
        # A conversation that could not have been given to the challenger is not a control of the trial either.
        if not serves(challenger):
            return control, None
        share = trial.promotion.share or 0.0
        return (challenger if _trial_position(challenger, conversation_id) < share else control), trial.seq

    def shadow_version(self, trial_seq: int | None) -> str | None:
        """Return the version that shadows the conversations of a trial, if it still does."""
        shadows = (trial for trial in self.trials.values() if trial.promotion.state is PromotionState.SHADOW)
        return next((trial.promotion.adapter for trial in shadows if trial.seq == trial_seq), None)


@dataclass
class PromotionFollower:
    """Keeps ``live``, the keys and the pool's adapters up to date with the store."""

    store: Engine
    pool: Pool
    data_dir: Path
    live: LiveVersions = field(default_factory=LiveVersions)
    keys: KeyRing = field(default_factory=KeyRing)

    async def run(self) -> None:
        """Follow the store until cancelled; while it does not answer, the last state stays."""
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
        """Read the store once; raises ``StoreError``."""
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
        """The live versions, or None if nothing has changed."""
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
            # The control of a trial stands for its capability in the routing prompt; only then is it split.
            challengers = {
                trial.promotion.adapter for capability, trial in trials_by_capability.items() if capability in versions
            }
            routes = {name: adapter_route(session, name) for name in records if name not in challengers}
            cycles = cycles_with_adapters(session)
        paths = {name: Path(record.path) for name, record in records.items()}
        files = tuple(classifier_file(self.data_dir, cycle_id) for cycle_id in cycles) if routes else ()
        # Before the files are read: a file that is written meanwhile is then read again at the next refresh.
        file_times = modification_times(files)
        classifier = _classifier(files, {capability_of(name): name for name in routes})
        return LiveVersions(seq, routes, paths, versions, trials_by_capability, classifier, files, file_times)


@dataclass
class ConversationRouter:
    """Routes conversations, each once, at its first request.

    Args:
        timeout_s: Seconds after which the base model serves.
        use_label_tokens: Ignore a fitted classifier.
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
        """Return the conversation's decision; ``messages`` are those of the request."""
        decision = self._decisions.get(conversation_id)
        # Not stored: that the conversation had already begun shows at its next request.
        if decision is None and not self.live().routes:
            return ConversationRoute(conversation_id, BASE, {}, 0.0, "no adapter is live", self.now())
        if decision is None or decision.cancelled():
            decision = asyncio.create_task(self._decide(conversation_id, messages))
            self._decisions[conversation_id] = decision
            if len(self._decisions) > CACHE_SIZE:
                self._decisions.popitem(last=False)
        else:
            self._decisions.move_to_end(conversation_id)
        # Shielded, because several requests of the conversation may wait for it.
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
        # Without any engine the request fails: the conversation begins with its next request.
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
            # Whatever went wrong, the request is answered.
            log.exception("routing of %s failed", conversation_id)
            return RoutingDecision(BASE, {}, 0.0, f"a defect of traced: {type(error).__name__}")

    def _find(self, conversation_ids: Sequence[str]) -> list[ConversationRoute | None]:
        with read_session(self.store) as session:
            routes = find_routes(session, conversation_ids)
        return [routes.get(conversation_id) for conversation_id in conversation_ids]

    def _save(self, routes: Sequence[ConversationRoute]) -> list[ConversationRoute]:
        """Store the routes; where another gateway was faster, its route is returned."""
        with write_session(self.store) as session:
            stored_routes = save_routes(session, routes)
        return [stored_routes[route.id] for route in routes]


def _trial_position(challenger: str, conversation_id: str) -> float:
    """A conversation's position in [0, 1) in a trial, by its id alone, so that every gateway decides the same."""
    # With the challenger's name, so that the next trial splits the conversations differently.
    text = f"{challenger} {conversation_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) / 2**64


def _valid_keys(keys: list[RouterKey]) -> dict[str, RouterKey] | None:
    return {key.hash: key for key in keys if key.revoked_at is None} if keys else None


def _classifier(files: Sequence[Path], versions: Mapping[str, str]) -> HiddenStateClassifier | None:
    """The newest fitted router that covers every capability, its classes named by the current versions."""
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
