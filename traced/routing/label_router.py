"""The router by label tokens: the base model chooses among labelled options (TRACE, section 3.5).

The routing prompt has the long form, or the short one for contexts up to ``SHORT_CONTEXT``. The options are prepared
once: their texts are shortened until they and a task fit the engine's context. More adapters than fit one prompt are
decided in rounds: in each group the likeliest adapter stays, and the last round includes the base model. The groups of
a round are requested at once, and their options are constant, so that the engine's prefix cache holds them.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from sandbox.contract import Task
from traced.inference.client import BASE, TOP_LOGPROBS, EngineClient
from traced.inference.errors import ContextLengthError, EngineError, RoutingPromptError
from traced.inference.routing_prompt import (
    EXAMPLE_LIMIT,
    LABELS,
    LONG_EXAMPLE_LIMIT,
    LONG_TASK_LIMIT,
    TASK_LIMIT,
    RouteOption,
    long_options,
    long_task,
    opening_text,
    route_options,
    short_options,
    short_task,
    task_text,
)
from traced.routing.routers import BY_LABELS, Route, RoutingDecision

# Up to this context (tokens) the prompt has the short form.
SHORT_CONTEXT = 2048
# Adapters per prompt. With the base model the labels of the long form are as many as the log-probs that an engine
# returns; the short form has as many as the bundled model is pre-trained on.
LONG_GROUP, SHORT_GROUP = TOP_LOGPROBS - 1, 6
# The least characters of an option that still mean something.
MIN_LIMIT = 24
# English text has about four characters per token, JSON three.
CHARS_PER_TOKEN = 3
# Tokens of ``Task:``, ``Answer:`` and the label.
FRAME_TOKENS = 16
# Prepared options of last rounds.
CACHE_SIZE = 256


@dataclass(frozen=True)
class Prompt:
    """Options that fit the context: the constant prefix, the model of each label, and the tokens left for a task."""

    prefix: str
    models: dict[str, str]
    task_tokens: int


@dataclass
class LabelRouter:
    """Asks the base model: arg-max over the label tokens' log-probs after the routing prompt.

    Args:
        context: The engine's context in tokens; 0: the engine is asked.
        prepared: Whether ``prepare`` has succeeded.
    """

    client: EngineClient
    adapters: Sequence[Route]
    context: int = 0
    name: str = BY_LABELS
    prepared: bool = False
    _ids: dict[str, int] = field(default_factory=dict)
    _prompts: "OrderedDict[tuple[str, ...], Prompt]" = field(default_factory=OrderedDict)

    async def choose(self, task: Task) -> RoutingDecision:
        """Choose the adapter that the base model names.

        Raises:
            ServingError: The engine fails, a label is not a single token, or the options do not fit the context.
        """
        started = time.perf_counter()
        if not self.adapters:
            raise RoutingPromptError("no adapter is available")
        if not self._ids:
            self.context = self.context or await self.client.context_length()
            self._ids = await self.client.label_ids(LABELS[:TOP_LOGPROBS])
        remaining = list(self.adapters)
        while len(remaining) > self._group_size:
            groups = _groups(remaining, self._group_size)
            winners = await asyncio.gather(*(self._ask(group, task, with_base=False) for group in groups))
            remaining = [group[_best(group, logprobs)] for group, logprobs in zip(groups, winners, strict=True)]
        logprobs = await self._ask(remaining, task, with_base=True)
        likeliest = max(logprobs, key=lambda model: logprobs[model])
        return RoutingDecision(likeliest, logprobs, time.perf_counter() - started, router=self.name)

    async def prepare(self) -> None:
        """Decide on an empty task, so that the engine's prefix cache holds the options; errors as for ``choose``."""
        await self.choose(Task("", [], []))
        self.prepared = True

    @property
    def _is_short(self) -> bool:
        # A server that states no context is not vLLM nor the embedded engine, so its model is no small one.
        return 0 < self.context <= SHORT_CONTEXT

    @property
    def _group_size(self) -> int:
        return SHORT_GROUP if self._is_short else LONG_GROUP

    async def _ask(self, routes: Sequence[Route], task: Task, *, with_base: bool) -> dict[str, float]:
        """Return the log-probs of these adapters, and of the base model; at least one."""
        prompt = await self._prompt(routes)
        labels = [label for label, model in prompt.models.items() if with_base or model != BASE]
        try:
            logprobs = await self._request(prompt, task, prompt.task_tokens * CHARS_PER_TOKEN, labels)
        except ContextLengthError:
            # The task has more tokens than its characters let expect; a character is hardly ever more than one token.
            logprobs = await self._request(prompt, task, prompt.task_tokens, labels)
        if not logprobs:
            raise EngineError("no label was among the likely next tokens")
        return logprobs

    async def _request(self, prompt: Prompt, task: Task, limit: int, labels: Sequence[str]) -> dict[str, float]:
        messages = task.messages
        end = short_task(opening_text(messages), limit) if self._is_short else long_task(task_text(messages), limit)
        ids = [self._ids[label] for label in labels]
        logprobs = await self.client.label_logprobs(prompt.prefix + end, labels, BASE, ids)
        return {prompt.models[label]: logprob for label, logprob in logprobs.items()}

    async def _prompt(self, routes: Sequence[Route]) -> Prompt:
        key = tuple(route.model for route in routes)
        if key in self._prompts:
            self._prompts.move_to_end(key)
            return self._prompts[key]
        skills = [(route.title, route.description, route.example, route.episode) for route in routes]
        options = route_options(skills)
        prefix, task_tokens = await self._fit(options)
        models = dict(zip((option.label for option in options), [*key, BASE], strict=True))
        self._prompts[key] = prompt = Prompt(prefix, models, task_tokens)
        if len(self._prompts) > CACHE_SIZE:
            self._prompts.popitem(last=False)
        return prompt

    async def _fit(self, options: Sequence[RouteOption]) -> tuple[str, int]:
        """Return the longest options that leave room for a task, and that room in tokens."""
        write, limit, task_limit = (
            (short_options, EXAMPLE_LIMIT, TASK_LIMIT)
            if self._is_short
            else (long_options, LONG_EXAMPLE_LIMIT, LONG_TASK_LIMIT)
        )
        if not self.context:
            return write(options, limit), task_limit // CHARS_PER_TOKEN
        while limit >= MIN_LIMIT:
            prefix = write(options, limit)
            task_tokens = self.context - len(await self.client.token_ids(prefix)) - FRAME_TOKENS
            if task_tokens >= self.context // (4 if self._is_short else 2):
                return prefix, task_tokens
            limit = limit * 3 // 4
        raise RoutingPromptError(
            f"{len(options)} options do not fit the context of {self.context} tokens", hint="engine.max_length"
        )


def _groups(routes: Sequence[Route], size: int) -> list[list[Route]]:
    """Split routes into as few groups of at most ``size`` as possible, of nearly the same length."""
    count = -(-len(routes) // size)
    return [list(routes[index * len(routes) // count : (index + 1) * len(routes) // count]) for index in range(count)]


def _best(group: Sequence[Route], logprobs: dict[str, float]) -> int:
    names = [route.model for route in group]
    return names.index(max(logprobs, key=lambda model: logprobs[model]))
