"""Policies: what answers the environment. A completion carries the engine's own token ids and log-probs.

Invariants: ``completion_ids`` and ``logprobs`` have one entry per sampled token, end-of-turn token included when it was
sampled; ``prompt_ids`` is the exact prompt the engine saw; nothing here ever re-tokenises text. A malformed answer of
the model is data (plain content in ``message``), never an exception; what ``complete`` raises is the engine's failure
and is attributed by ``traced.rollout.episodes``. Not covered: routing (``traced.serving.router.RoutedPolicy``).
"""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sandbox.contract import Message, Tool

if TYPE_CHECKING:
    from traced.serving.client import EngineClient
    from traced.serving.embedded.core import Engine


@dataclass(frozen=True)
class Completion:
    """One assistant message as the engine made it; ``logprobs[i]`` (nats) belongs to ``completion_ids[i]``."""

    message: Message
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" | "length" | "tool_calls"


class Policy(Protocol):
    """Answers a conversation with one assistant message."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Sample one assistant message; the same arguments give the same message. Raises on an engine failure."""
        ...


@dataclass(frozen=True)
class HttpPolicy:
    """A model (base or adapter) behind an engine's HTTP API."""

    client: "EngineClient"
    model: str
    temperature: float = 1.0
    max_tokens: int = 256

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """One chat completion; the client's errors pass through."""
        return await self.client.chat(
            self.model, messages, tools, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
        )


@dataclass(frozen=True)
class InProcessPolicy:
    """A model in this process behind a started ``Engine``; concurrent calls share its batches."""

    engine: "Engine"
    tokenizer: Any
    adapter: str | None = None
    temperature: float = 1.0
    max_tokens: int = 256

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """One completion of the rendered conversation; the engine's errors pass through."""
        from traced.serving.embedded.chat import count_calls, parse, render
        from traced.serving.embedded.core import Sampling

        prompt_ids = render(self.tokenizer, messages, tools)
        sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)
        generation = await asyncio.wrap_future(self.engine.submit(prompt_ids, sampling, self.adapter))
        text = self.tokenizer.decode(generation.ids, skip_special_tokens=True)
        message = parse(text, first_call=count_calls(messages))
        return Completion(message, prompt_ids, generation.ids, generation.logprobs, generation.finish_reason)
