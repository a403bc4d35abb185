"""The decision on a conversation: made once, kept in the store, the same after a restart and at every router.

Invariants: one decision per conversation, at its first request; a conversation that had begun before anything was live
stays with the base model. Deciding never fails a request: where the engine, the store or the time fails, the base model
answers and the decision says why. A decision that the store did not take holds in this process.
Not covered: what a decided version has become since (``live.Live.now``).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Engine

from sandbox.contract import Task
from store.database import reading, session
from store.errors import StoreError
from store.repositories.serving import find_routes, save_routes
from store.serving_records import ConversationRoute
from traced.serving.client import BASE
from traced.serving.gateway.batching import Batcher
from traced.serving.gateway.engines import Pool
from traced.serving.gateway.identity import answered
from traced.serving.gateway.live import Live
from traced.serving.hidden_state_router import HiddenStateRouter
from traced.serving.opening import opening_messages
from traced.serving.router import LabelRouter, Router, RoutingDecision

REMEMBERED = 50_000  # conversations
log = logging.getLogger(__name__)


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
