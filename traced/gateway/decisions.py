"""Choose the model for a conversation, and store the routing decisions.

Invariants:
- A conversation is routed once. The decision is stored, so it is the same at every gateway and after a restart.
- A conversation that began before any version was live stays with the base model.
- While the store does not answer, a decision that could not be stored is valid in this process only.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import Engine

from sandbox.contract import Message
from store.database import read_session, write_session
from store.errors import StoreError
from store.records import ConversationRoute
from store.repositories.serving import find_routes, save_routes
from traced.gateway.batching import Batcher
from traced.gateway.engines import Pool
from traced.gateway.live_versions import LiveVersions
from traced.gateway.router_choice import RouterChoice
from traced.inference.client import BASE
from traced.ingest.conversations import history_length
from traced.routing.routers import RoutingDecision

# Maximum number of conversations whose decision is cached.
CACHE_SIZE = 50_000
log = logging.getLogger(__name__)


@dataclass
class ConversationRouter:
    """Routes each conversation once, at its first request."""

    store: Engine
    pool: Pool
    live: Callable[[], LiveVersions]
    now: Callable[[], datetime]
    router_choice: RouterChoice
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
        return await self.router_choice.choose(conversation_id, messages, live)

    def _find(self, conversation_ids: Sequence[str]) -> list[ConversationRoute | None]:
        with read_session(self.store) as session:
            routes = find_routes(session, conversation_ids)
        return [routes.get(conversation_id) for conversation_id in conversation_ids]

    def _save(self, routes: Sequence[ConversationRoute]) -> list[ConversationRoute]:
        """Store the routes and return the stored ones: those of another gateway where it was faster."""
        with write_session(self.store) as session:
            stored_routes = save_routes(session, routes)
        return [stored_routes[route.id] for route in routes]
