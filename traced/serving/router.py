"""Which adapter serves a conversation: a router chooses once per conversation, and the choice holds for all its turns.

Two routers exist: ``LabelRouter``, the paper's arg-max over the label tokens after the routing prompt (TRACE, section
3.5), and ``hidden_state_router.HiddenStateRouter`` for models too small for that. Routing never fails a request: when
the engine cannot answer, a label is not a single token of its tokenizer or none is among the likely tokens, the base
model serves and the decision says why.
"""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sandbox.contract import Message, Task, Tool
from traced.rollout.policy import Completion
from traced.serving.client import BASE as BASE
from traced.serving.client import EngineClient
from traced.serving.errors import ServingError
from traced.serving.opening import opening_messages
from traced.serving.routing_prompt import opening_text, route_options, routing_prompt

REMEMBERED = 10_000  # conversations whose choice is kept


@dataclass(frozen=True)
class Route:
    """An adapter on offer: the name it is served under, and its line in the routing prompt."""

    model: str
    title: str
    description: str
    example: str = ""


@dataclass(frozen=True)
class RoutingDecision:
    """The chosen model, the options' log-probs (nats) by model name, the time taken, and why if base by default."""

    model: str
    logprobs: dict[str, float]
    seconds: float
    why: str = ""


class Router(Protocol):
    """Chooses the model for a task from its opening messages."""

    async def choose(self, task: Task) -> RoutingDecision:
        """The decision. Never raises a ``ServingError``: the base model serves when it cannot choose."""
        ...


@dataclass(frozen=True)
class LabelRouter:
    """Asks the base model itself: arg-max over the label tokens' log-probs after the routing prompt."""

    client: EngineClient
    adapters: Sequence[Route]

    async def choose(self, task: Task) -> RoutingDecision:
        """Ask the base model which adapter the task needs. Never raises a ``ServingError``."""
        started = time.perf_counter()
        if not self.adapters:
            return RoutingDecision(BASE, {}, 0.0, "no adapter is on offer")
        try:
            options = route_options([(route.title, route.description, route.example) for route in self.adapters])
            names = [*(route.model for route in self.adapters), BASE]
            models = dict(zip((option.label for option in options), names, strict=True))
            prompt = routing_prompt(opening_text(task.messages), options)
            await self.client.check_labels(list(models))
            found = await self.client.label_logprobs(prompt, list(models), BASE)
        except ServingError as error:
            return RoutingDecision(BASE, {}, time.perf_counter() - started, f"routing failed: {error}")
        logprobs = {models[label]: logprob for label, logprob in found.items()}
        seconds = time.perf_counter() - started
        if not logprobs:
            return RoutingDecision(BASE, {}, seconds, "no label was among the likely next tokens")
        return RoutingDecision(max(logprobs, key=lambda model: logprobs[model]), logprobs, seconds)


class RoutedPolicy:
    """The rollout's ``Policy`` over the base model and its adapters: the first completion of a conversation decides."""

    def __init__(
        self,
        client: EngineClient,
        router: Router,
        *,
        temperature: float = 1.0,
        max_tokens: int = 256,
    ) -> None:
        self.client = client
        self.router = router
        self.temperature = temperature
        self.max_tokens = max_tokens
        self._choices: OrderedDict[str, asyncio.Task[RoutingDecision]] = OrderedDict()

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """One completion by the model that this conversation was routed to; the client's errors pass through."""
        decision = await self.route(messages)
        return await self.client.chat(
            decision.model, messages, tools, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
        )

    async def route(self, messages: Sequence[Message]) -> RoutingDecision:
        """The conversation's decision, made at its first turn. Conversations that open alike share one."""
        opening = opening_messages(messages)
        key = json.dumps(opening, sort_keys=True)
        if key not in self._choices:
            self._choices[key] = asyncio.create_task(self.router.choose(Task("", opening, [])))
            if len(self._choices) > REMEMBERED:
                self._choices.popitem(last=False)
        return await asyncio.shield(self._choices[key])  # one caller's cancellation is not the others'
