"""What is live, as the router sees it: the promotions in the store, followed while requests are in flight.

Invariants: what is rolled back takes no new request from the next look on (``LOOK_S``), before anything is unloaded;
what is promoted takes requests at an engine when that engine has confirmed it (``engines``). A conversation that was
given a version which is live no more goes on with its capability's live version, or with the base model. Which of a
capability's conversations a canary gets depends on their ids alone, so that every router says the same. The router that
a cycle fits after its promotions decides from the next look on; until then, and where none knows all that is offered,
the label tokens do (``traced.routing.router_files``).
How it fails: while the store does not answer the router goes on with what it knew. Not covered: who may promote.

Many small questions to the store as few large ones: what is asked while one call runs goes into the next.

The decision on a conversation: made once, kept in the store, the same after a restart and at every router.

Invariants: one decision per conversation, at its first request; a conversation that had begun before anything was live
stays with the base model. Deciding never fails a request: where the engine, the store or the time fails, the base model
answers and the decision says why. A decision that the store did not take holds in this process.
Not covered: what a decided version has become since (``live.Live.now``).
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
from typing import Any, Generic, TypeVar

from sqlalchemy import Engine

from sandbox.contract import Task
from store.database import reading, session
from store.errors import StoreError
from store.records import ConversationRoute, PromotionState, RouterKey, Trial
from store.repositories.adapters import fitting_cycles
from store.repositories.promotions import last_promotion, live_adapters, trials
from store.repositories.serving import find_routes, list_keys, save_routes
from store.types import opening_messages
from traced.gateway.access import Keys
from traced.gateway.engines import Pool
from traced.inference.client import BASE
from traced.inference.errors import RouterFileError
from traced.ingest.conversations import answered
from traced.routing.router_files import capability_of, classifier_file, stamp, unknown
from traced.routing.routers import (
    HiddenStateClassifier,
    HiddenStateRouter,
    LabelRouter,
    Route,
    Router,
    RoutingDecision,
    described,
    read_classifier,
    route,
)

Q = TypeVar("Q")
A = TypeVar("A")


@dataclass
class Batcher(Generic[Q, A]):
    """Calls ``call`` on a thread with all questions that wait; it returns their answers in order.

    Invariants: one call runs at a time; a question alone waits for nothing. What ``call`` raises is raised to everybody
    in that call. A question whose asker is cancelled is asked none the less.
    """

    call: Callable[[Sequence[Q]], Sequence[A]]
    most: int = 500
    _waiting: "list[tuple[Q, asyncio.Future[A]]]" = field(default_factory=list)
    _worker: "asyncio.Task[None] | None" = None

    async def ask(self, question: Q) -> A:
        """The answer to one question."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self.most], self._waiting[self.most :]
            try:
                found = await asyncio.to_thread(self.call, [question for question, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), told in zip(batch, found, strict=True):
                if not answer.done():
                    answer.set_result(told)


LOOK_S = 0.2
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Live:
    """What is live and what is on trial; ``seq`` is the log entry that it is as of.

    ``routes`` are the versions that a decision chooses among, with their lines in the routing prompt: of each
    capability the live one, or the one on trial where none is live. ``paths`` are all that engines should have.
    """

    seq: int = -1
    routes: dict[str, Route] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # capability to its live version
    trials: dict[str, Trial] = field(default_factory=dict)  # by capability
    classifier: HiddenStateClassifier | None = None
    fitted: tuple[Path, ...] = ()  # where routers of the live adapters may lie, the newest first
    stamp: tuple[int, ...] = ()  # of these files, as they were read

    def now(self, model: str) -> str:
        """What a conversation that was given ``model`` goes on with."""
        if model == BASE or model in self.paths:
            return model
        return self.versions.get(capability_of(model), BASE)

    def assigned(self, chosen: str, conversation_id: str, serves: Callable[[str], bool]) -> tuple[str, int | None]:
        """Who gets a conversation for which a decision named ``chosen``, and the trial that it takes part in."""
        trial = self.trials.get(capability_of(chosen))
        if trial is None:
            return chosen, None
        standing, challenger = self.versions.get(trial.capability, BASE), trial.promotion.adapter
        if not serves(challenger):
            return standing, None  # one that cannot have the challenger is no control either
        share = trial.promotion.share or 0.0  # a shadow has none
        return (challenger if _place(challenger, conversation_id) < share else standing), trial.seq

    def shadow(self, trial: int | None) -> str | None:
        """The version that answers in the shadow of a conversation of this trial, if it still does."""
        shadows = (one for one in self.trials.values() if one.promotion.state is PromotionState.SHADOW)
        return next((one.promotion.adapter for one in shadows if one.seq == trial), None)


@dataclass
class Follower:
    """Keeps ``live`` and the pool's wish to what the store says."""

    store: Engine
    pool: Pool
    data_dir: Path
    live: Live = field(default_factory=Live)
    keys: Keys = field(default_factory=Keys)

    async def keep(self) -> None:
        """Follow the store until cancelled."""
        told = ""
        while True:
            try:
                await self.look()
                told = ""
            except StoreError as error:
                if told != str(error):
                    told = str(error)
                    log.warning("the router goes on with what was live: %s", told)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look once; raises ``StoreError``, and then nobody knows who may ask: a router does not begin so."""
        found = await asyncio.to_thread(self._read)
        if found is not None:
            self.live = found
            self.pool.want(found.paths)
            by = "a fitted router" if found.classifier is not None else "label tokens"
            log.info("live: %s; decided by %s", ", ".join(found.versions.values()) or "the base model alone", by)
            for one in found.trials.values():
                share = "" if one.promotion.share is None else f", {100 * one.promotion.share:g} %"
                log.info("on trial: %s (%s%s)", one.promotion.adapter, one.promotion.state, share)

    def _read(self) -> Live | None:
        with reading(self.store) as opened:
            self.keys.known = _keys(list_keys(opened))
            seq = last_promotion(opened)
            if seq == self.live.seq and stamp(self.live.fitted) == self.live.stamp:
                return None
            on_trial = {one.capability: one for one in trials(opened)}
            told = {one.adapter: described(opened, one.adapter)[0] for one in live_adapters(opened)}
            versions = {version.capability: name for name, version in told.items()}
            told |= {one.promotion.adapter: described(opened, one.promotion.adapter)[0] for one in on_trial.values()}
            challengers = {one.promotion.adapter for name, one in on_trial.items() if name in versions}
            routes = {name: route(opened, name) for name in told if name not in challengers}
            cycles = fitting_cycles(opened)
        paths = {name: Path(version.path) for name, version in told.items()}
        fitted = tuple(classifier_file(self.data_dir, cycle_id) for cycle_id in cycles) if routes else ()
        read = stamp(fitted)  # before they are read: what is written meanwhile is read at the next look
        classifier = _classifier(fitted, {capability_of(name): name for name in routes})
        return Live(seq, routes, paths, versions, on_trial, classifier, fitted, read)


def _place(challenger: str, conversation_id: str) -> float:
    """A conversation's place in [0, 1) among those of a trial; another challenger deals anew."""
    told = f"{challenger} {conversation_id}".encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest()) / 2**64


def _keys(keys: list[RouterKey]) -> dict[str, RouterKey] | None:
    return {key.hash: key for key in keys if key.revoked_at is None} if keys else None


def _classifier(fitted: Sequence[Path], versions: Mapping[str, str]) -> HiddenStateClassifier | None:
    """The newest fitted router that knows every capability offered, its classes named by the versions offered."""
    for path in fitted:
        try:
            found = read_classifier(path)
        except RouterFileError:
            continue
        if not unknown(found.examples, versions.values()):  # what is offered no more is the base model (Live.now)
            return replace(found, classes=[versions.get(capability_of(model), model) for model in found.classes])
    return None


REMEMBERED = 50_000  # conversations


@dataclass
class Decisions:
    """Who decides; ``labels`` asks by label tokens even where a classifier was fitted."""

    store: Engine
    pool: Pool
    live: Callable[[], Live]
    now: Callable[[], datetime]
    timeout_s: float
    labels: bool
    _known: "OrderedDict[str, asyncio.Task[ConversationRoute]]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._finding = Batcher(self._find)
        self._saving = Batcher(self._save)

    async def decide(self, conversation_id: str, messages: Sequence[Mapping[str, Any]]) -> ConversationRoute:
        """The conversation's decision; ``messages`` are those of the request."""
        known = self._known.get(conversation_id)
        if known is None and not self.live().routes:  # nothing to decide; that it had begun is seen at its next request
            return ConversationRoute(conversation_id, BASE, {}, 0.0, "no adapter is live", self.now())
        if known is None or known.cancelled():
            known = asyncio.create_task(self._decide(conversation_id, messages))
            self._known[conversation_id] = known
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(conversation_id)
        return await asyncio.shield(known)  # one client's hanging up is not the others'

    async def _decide(self, conversation_id: str, messages: Sequence[Mapping[str, Any]]) -> ConversationRoute:
        began = time.perf_counter()
        live = self.live()
        try:
            if (found := await self._finding.ask(conversation_id)) is not None:
                return found
        except StoreError as error:
            log.warning("the decision on %s cannot be looked up: %s", conversation_id, error)
        if answered(messages):
            made = RoutingDecision(BASE, {}, 0.0, "the conversation had begun before it was routed")
        else:
            made = await self._choose(conversation_id, messages, live)
        seconds = time.perf_counter() - began
        model, trial = live.assigned(made.model, conversation_id, self.pool.serves)
        route = ConversationRoute(conversation_id, model, made.logprobs, seconds, made.why, self.now(), trial)
        if not self.pool.serves(BASE):  # nobody is answered either: the conversation begins with its next request
            self._known.pop(conversation_id, None)
            return route
        try:
            return await self._saving.ask(route)
        except StoreError as error:
            log.warning("the decision on %s is not stored: %s", conversation_id, error)
            return route

    async def _choose(self, conversation_id: str, messages: Sequence[Mapping[str, Any]], live: Live) -> RoutingDecision:
        replica = self.pool.pick(BASE, conversation_id)
        if replica is None:
            return RoutingDecision(BASE, {}, 0.0, "no engine answers")
        offered = [route for name, route in live.routes.items() if self.pool.serves(name)]
        chooser: Router = LabelRouter(replica.client, offered)
        if live.classifier is not None and not self.labels:
            chooser = HiddenStateRouter(replica.client, live.classifier)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await chooser.choose(Task("", [dict(one) for one in opening_messages(messages)], []))
        except TimeoutError:
            return RoutingDecision(BASE, {}, self.timeout_s, f"no decision within {self.timeout_s:g} s")
        except Exception as error:  # whatever it is, the request is answered
            log.exception("deciding on %s failed", conversation_id)
            return RoutingDecision(BASE, {}, 0.0, f"a defect of traced: {type(error).__name__}")

    def _find(self, conversation_ids: Sequence[str]) -> list[ConversationRoute | None]:
        with reading(self.store) as opened:
            found = find_routes(opened, conversation_ids)
        return [found.get(conversation_id) for conversation_id in conversation_ids]

    def _save(self, routes: Sequence[ConversationRoute]) -> list[ConversationRoute]:
        with session(self.store) as opened:
            counting = save_routes(opened, routes)
        return [counting[route.id] for route in routes]
