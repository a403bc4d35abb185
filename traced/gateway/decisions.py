"""Choose the model of a conversation.

Invariants:
- A conversation is routed once, in memory; the decision is stored behind the answer. It depends on the conversation's
  messages and its id alone, so other routers decide the same, and the first stored decision holds for all.
- A decision that failed holds for one request: the next one of the conversation is routed again.
- A conversation that began before any version was live stays with the base model.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sandbox.contract import Message
from store.errors import StoreError
from store.records import ConversationRoute
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversation, Conversations
from traced.gateway.engines import Pool
from traced.gateway.live_versions import LiveVersions
from traced.gateway.router_choice import RouterChoice
from traced.inference.client import BASE
from traced.routing.routers import RoutingDecision

log = logging.getLogger(__name__)


@dataclass
class ConversationRouter:
    """Routes each conversation once, at its first request."""

    conversations: Conversations
    writer: ConversationWriter
    pool: Pool
    live: Callable[[], LiveVersions]
    now: Callable[[], datetime]
    router_choice: RouterChoice

    async def decide(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        """Return the conversation's routing decision; ``messages`` are those of the current request."""
        if conversation.route is not None:
            return conversation.route
        if conversation.deciding is None:
            conversation.deciding = asyncio.create_task(self._decide(conversation, messages))
        # Shielded, because several requests of the conversation may wait for the same decision.
        return await asyncio.shield(conversation.deciding)

    async def _decide(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        try:
            # Both at once: the store rarely has a decision, and the engine's takes longer.
            stored_route, route = await asyncio.gather(
                self._stored_route(conversation), self._new_route(conversation, messages)
            )
            if stored_route is not None:
                conversation.route = stored_route
                return stored_route
            # Without an engine the request fails, so the conversation is routed again at its next request.
            if self.pool.serves(BASE):
                self._keep(conversation, route)
            return route
        finally:
            conversation.deciding = None

    def _keep(self, conversation: Conversation, route: ConversationRoute) -> None:
        self._use(conversation, route)
        self.writer.add_route(route, lambda valid_route: self._use(conversation, valid_route))

    def _use(self, conversation: Conversation, route: ConversationRoute) -> None:
        if not route.is_failure:
            conversation.route = route

    async def _new_route(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        started = time.perf_counter()
        live = self.live()
        if live.routes:
            decision = await self._choose(conversation.id, messages, live)
        else:
            decision = RoutingDecision(BASE, {}, 0.0, "no adapter is live")
        # A conversation whose decision failed must not count for the control of a trial.
        is_failure = decision.failed
        model, trial = (BASE, None) if is_failure else live.assign(decision.model, conversation.id, self.pool.serves)
        seconds = time.perf_counter() - started
        return ConversationRoute(
            conversation.id, model, decision.logprobs, seconds, decision.reason, self.now(), trial, is_failure
        )

    async def _stored_route(self, conversation: Conversation) -> ConversationRoute | None:
        if not conversation.may_be_stored:
            return None
        try:
            route = await self.conversations.stored_route(conversation)
        except StoreError as error:
            log.warning("the routing decision on %s cannot be read: %s", conversation.id, error)
            return None
        conversation.may_be_stored = False
        return route

    async def _choose(self, conversation_id: str, messages: Sequence[Message], live: LiveVersions) -> RoutingDecision:
        return await self.router_choice.choose(conversation_id, messages, live)
