"""Choose the model of a conversation.

Invariants:
- A conversation is routed once, in memory; the decision is stored behind the answer. The first stored decision holds
  for all routers. Where others use the same store, a conversation that its client has named may reach two of them at
  once: then its decision is stored before its first answer.
- With ``routing.when = "turn"``, or a composition per turn, each message of the user is routed again, by itself. The
  conversation moves only if another adapter is likelier by ``routing.margin``; its new engine state costs one prefill.
- A decision that failed holds for one request: the next one of the conversation is routed again.
- A conversation that began before any version was live stays with the base model.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from sandbox.contract import Message
from store.errors import StoreError
from store.records import ConversationRoute
from store.types import opening_messages
from traced.gateway.conversation_writer import ConversationWriter
from traced.gateway.conversations import Conversation, Conversations
from traced.gateway.engines import Pool
from traced.gateway.live_versions import LiveVersions
from traced.gateway.metrics import Metrics
from traced.gateway.router_choice import RouterChoice
from traced.inference.client import BASE
from traced.ingest.conversations import turn_messages
from traced.routing.composition import capability_of
from traced.routing.routers import RoutingDecision, takes_over

log = logging.getLogger(__name__)


@dataclass
class ConversationRouter:
    """Routes each conversation at its first request, and with ``by_turn`` at each message of its user.

    Args:
        margin: How much likelier (nats) another adapter must be to take over a conversation.
    """

    conversations: Conversations
    writer: ConversationWriter
    pool: Pool
    live: Callable[[], LiveVersions]
    now: Callable[[], datetime]
    router_choice: RouterChoice
    metrics: Metrics
    by_turn: bool = False
    margin: float = 0.0

    async def decide(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        """Return the conversation's routing decision; ``messages`` are those of the current request."""
        if conversation.route is not None:
            turn = turn_messages(messages) if self._is_by_turn(self.live()) else []
            if not turn:
                return conversation.route
            if conversation.deciding is None:
                conversation.deciding = asyncio.create_task(self._decide_turn(conversation, conversation.route, turn))
        elif conversation.deciding is None:
            conversation.deciding = asyncio.create_task(self._decide(conversation, messages))
        # Shielded, because several requests of the conversation may wait for the same decision.
        return await asyncio.shield(conversation.deciding)

    def _is_by_turn(self, live: LiveVersions) -> bool:
        by_turn = self.by_turn if live.composition is None else live.composition.by_turn
        return by_turn and bool(live.routes)

    async def _decide(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        try:
            # Both at once: the store rarely has a decision, and the engine's takes longer.
            stored_route, route = await asyncio.gather(
                self._stored_route(conversation), self._new_route(conversation, messages)
            )
            if stored_route is not None:
                conversation.route = stored_route
                return stored_route
            # Without an engine the request fails. While adapters are loaded not all of them can be chosen: what went to
            # the base model is routed again at its next request.
            is_by_default = route.model == BASE and route.trial is None and self._is_loading()
            if not self.pool.serves(BASE) or is_by_default:
                return route
            if self.conversations.has_peers() and conversation.is_named and not route.is_failure:
                self._keep(conversation, route)
                # Another router may have stored a decision first, which then holds here as well.
                await self.writer.wait_until_stored()
                return conversation.route or route
            self._keep(conversation, route)
            return route
        finally:
            conversation.deciding = None

    async def _decide_turn(
        self, conversation: Conversation, route: ConversationRoute, turn: Sequence[Message]
    ) -> ConversationRoute:
        try:
            if self.conversations.has_peers():
                # Another router may have moved the conversation.
                conversation.may_be_stored = True
                route = await self._stored_route(conversation) or route
                self._use(conversation, route)
            live = self.live()
            decision = await self._choose(conversation.id, turn, live)
            # What the conversation was routed to; in a trial its control serves it.
            routed_model = max(route.logprobs, key=lambda name: route.logprobs[name], default=route.model)
            capability = capability_of(routed_model)
            current = next((name for name in live.routes if capability_of(name) == capability), BASE)
            if not takes_over(decision, current, self.margin):
                return route
            new_route = self._route_of(conversation, decision, live)
            if self.pool.serves(BASE):
                self._keep(conversation, new_route, is_move=True)
            return new_route
        finally:
            conversation.deciding = None

    def _keep(self, conversation: Conversation, route: ConversationRoute, *, is_move: bool = False) -> None:
        self._use(conversation, route)
        self.writer.add_route(route, lambda valid_route: self._use(conversation, valid_route), is_move=is_move)

    def _is_loading(self) -> bool:
        """Return whether an adapter that a router may choose will soon be loaded."""
        live = self.live()
        names = [name for name in live.routes if not self.pool.serves(name) and not self.pool.refuses(name)]
        return bool(names) and len(live.paths) <= self.pool.max_adapters

    def _use(self, conversation: Conversation, route: ConversationRoute) -> None:
        if not route.is_failure:
            conversation.route = route

    async def _new_route(self, conversation: Conversation, messages: Sequence[Message]) -> ConversationRoute:
        live = self.live()
        if live.routes:
            decision = await self._choose(conversation.id, opening_messages(messages), live)
        else:
            decision = RoutingDecision(BASE, {}, 0.0, "no adapter is live")
        return self._route_of(conversation, decision, live)

    def _route_of(self, conversation: Conversation, decision: RoutingDecision, live: LiveVersions) -> ConversationRoute:
        # A conversation whose decision failed must not count for the control of a trial.
        is_failure = decision.failed
        model, trial = (BASE, None) if is_failure else live.assign(decision.model, conversation.id, self.pool.serves)
        seconds, reason = decision.seconds, decision.reason
        return ConversationRoute(
            conversation.id, model, decision.logprobs, seconds, reason, self.now(), trial, is_failure
        )

    async def _stored_route(self, conversation: Conversation) -> ConversationRoute | None:
        if not conversation.may_be_stored:
            return None
        try:
            route = await self.conversations.stored_route(conversation)
        except (StoreError, TimeoutError) as error:
            reason = str(error) or "no answer from the store in time"
            log.warning("the routing decision on %s cannot be read: %s", conversation.id, reason)
            return None
        conversation.may_be_stored = False
        return route

    async def _choose(self, conversation_id: str, messages: Sequence[Message], live: LiveVersions) -> RoutingDecision:
        started = time.perf_counter()
        decision = await self.router_choice.choose(conversation_id, messages, live)
        self.metrics.note_decision(decision.model, decision.router or "none")
        if decision.failed:
            self.metrics.note_fallback("no_router")
        elif decision.fallbacks:
            self.metrics.note_fallback("next_router")
        return replace(decision, seconds=time.perf_counter() - started)
