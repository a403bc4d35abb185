"""Policies: a model behind an engine as the agent of an episode.

``TokenPolicy`` renders the conversation itself and requests token ids, so templates and parsers are the same for every
engine. ``ChatPolicy`` is for servers without token ids: they render and parse, and its completions have no tokens.
"""

import asyncio
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sandbox.contract import Message, Tool
from store.types import opening_messages
from traced.inference.chat_format import ChatFormat, count_calls
from traced.inference.client import Completion
from traced.inference.errors import ContextLengthError
from traced.inference.generation import Request, Sampling
from traced.inference.replicas import Replicas

if TYPE_CHECKING:
    from traced.inference.embedded.engine import Engine


class Policy(Protocol):
    """Answers a conversation with one assistant message."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Sample one assistant message; the same arguments give the same message. Raises the engine's errors."""
        ...


@dataclass(frozen=True)
class TokenPolicy:
    """A base model or adapter behind engines that take and return token ids.

    Args:
        adapter: The name under which the engines serve the adapter; None for the base model.
        max_length: Maximum tokens of prompt and completion together.
    """

    replicas: Replicas
    chat_format: ChatFormat
    adapter: str | None
    max_length: int
    temperature: float = 1.0
    max_tokens: int = 256

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Render the conversation, complete it on one of the engines, and parse the answer."""
        prompt_ids = self.chat_format.render(messages, tools)
        free_tokens = self.max_length - len(prompt_ids)
        if free_tokens < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt_ids)} tokens and the context holds {self.max_length}",
                hint="engine.max_length",
            )
        sampling = Sampling(
            self.temperature, min(self.max_tokens, free_tokens), seed, stop_ids=tuple(self.chat_format.stop_ids)
        )
        request = Request(prompt_ids, sampling, self.adapter)
        generation = await self.replicas.generate(request, conversation_key(messages))
        message = self.chat_format.parse(generation.ids, first_call=count_calls(messages), tools=tools)
        return Completion(message, prompt_ids, generation.ids, generation.logprobs, generation.finish_reason)


def conversation_key(messages: Sequence[Message]) -> str:
    """Return a text that is the same for all turns of a conversation, to choose its engine."""
    opening_text = json.dumps(opening_messages(messages), sort_keys=True, default=str)
    return hashlib.blake2b(opening_text.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ChatPolicy:
    """The base model of a server without token ids; completions have neither tokens nor log-probs."""

    replicas: Replicas
    temperature: float = 1.0
    max_tokens: int = 256

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Request one chat completion."""
        return await self.replicas.on_one(
            lambda client: client.chat_text(
                messages, tools, temperature=self.temperature, max_tokens=self.max_tokens, seed=seed
            ),
            conversation=conversation_key(messages),
        )


@dataclass(frozen=True)
class InProcessPolicy:
    """A model in this process behind a started ``Engine``; concurrent calls share its batches."""

    engine: "Engine"
    chat_format: "ChatFormat"
    adapter: str | None = None
    temperature: float = 1.0
    max_tokens: int = 256

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Render the conversation and complete it with the engine; raises the engine's errors."""
        prompt_ids = self.chat_format.render(messages, tools)
        sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)
        generation = await asyncio.wrap_future(self.engine.submit(prompt_ids, sampling, self.adapter))
        message = self.chat_format.parse(generation.ids, first_call=count_calls(messages), tools=tools)
        return Completion(message, prompt_ids, generation.ids, generation.logprobs, generation.finish_reason)
