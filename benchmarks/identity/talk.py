"""A user at work: opens conversations, sends requests with patience, runs the tools of agents.

A request that fails (status 500, time-out, router away) is sent again as it was, after the library's own retries, as a
person does who presses the button again. Invariant: a request enters the ledger before it is sent.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anthropic
import openai

from benchmarks.identity.clients import Clients
from benchmarks.identity.ledger import CURRENT, TIMEOUT_S, Conversation, Ledger, Message, Request
from benchmarks.identity.population import Profile, draw_follow_up, draw_opening

# Seconds between an answer and the next request: as many as keep the conversations of a key interleaved.
THINK_S = 0.05
TRIES = 8
MAX_TOOL_ROUNDS = 6
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"reference": {"type": "string"}}},
        },
    }
    for name, description in (("find_order", "Find an order."), ("read_policy", "Read a policy."))
]


class RequestLost(Exception):
    """A request failed in all its tries."""


def system_prompt(profile: Profile) -> str:
    """Return the system prompt of the user's application."""
    prompt = f"You are the assistant of the {profile.key}. Be friendly and correct."
    return f"{prompt} The user is called user-{profile.number}." if profile.name_in_prompt else prompt


@dataclass
class User:
    """A user with the clients of its key; ``router_up`` is set while the router runs."""

    profile: Profile
    clients: Clients
    ledger: Ledger
    router_up: asyncio.Event

    def open(
        self,
        system: Callable[[], str] | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        client: str = "",
    ) -> "Talk":
        """Open a true conversation with the system prompt of the application or another one."""
        profile = self.profile
        separators: dict[str, str] = {}
        if profile.states_user and profile.client != "anthropic":
            field_name = "user" if profile.number % 2 else "safety_identifier"
            separators[field_name] = f"user-{profile.number}"
        if profile.states_cache_key and profile.client != "anthropic":
            separators["prompt_cache_key"] = f"{profile.key}-prompts"
        conversation = self.ledger.open(profile.key, profile.persona, profile.id_form, separators)
        text = system_prompt(profile)
        return Talk(self, conversation, system or (lambda: text), list(tools), client or profile.client)

    def draw_opening(self) -> str:
        """Draw an opening."""
        return draw_opening(self.profile.draw)

    def draw_follow_up(self) -> str:
        """Draw a follow-up."""
        return draw_follow_up(self.profile.draw)

    async def think(self) -> None:
        """Pause as people and tools do."""
        await asyncio.sleep(self.profile.pauses.uniform(0, 2 * THINK_S))


@dataclass
class Talk:
    """A true conversation as its client has it.

    Args:
        messages: Without the system prompt. The first ``prefix`` of them were written by the client.
        rewrite: What the client does to the messages before it sends them.
    """

    user: User
    conversation: Conversation
    system: Callable[[], str]
    tools: list[dict[str, Any]]
    client: str
    messages: list[Message] = field(default_factory=list)
    prefix: int = 0
    rewrite: Callable[[Sequence[Message]], list[Message]] = list
    answer_count: int = 0

    async def ask(self, text: str, **options: Any) -> Message:
        """Add a user message and send the conversation; tools are run until the answer is text."""
        self.messages.append({"role": "user", "content": text})
        return await self.proceed(**options)

    async def proceed(self, **options: Any) -> Message:
        """Send the conversation as it is and add the answer; tools are run until the answer is text."""
        for _ in range(MAX_TOOL_ROUNDS):
            message = await self.send(self.messages, **options)
            self.messages.append(message)
            if not message.get("tool_calls"):
                break
            self.messages += [self.run_tool(call) for call in message["tool_calls"]]
        return self.messages[-1]

    def run_tool(self, call: Message) -> Message:
        """Return the message with the result of a tool call."""
        reference = json.loads(call["function"]["arguments"]).get("reference", "")
        result = {"reference": reference, "state": "on its way", "lines": [reference[-1:], "blue", 2]}
        return {"role": "tool", "tool_call_id": call["id"], "content": json.dumps(result)}

    async def send(
        self,
        messages: Sequence[Message],
        *,
        continues: bool | None = None,
        without_context: bool = False,
        patience_s: float = TIMEOUT_S,
        **options: Any,
    ) -> Message:
        """Send messages and return the answer, until it comes.

        Args:
            continues: Whether the messages continue the conversation though they hold no assistant message.
            without_context: Send neither system prompt nor tools.
            patience_s: The client's time-out at the first try.
        """
        has_history = any(message["role"] == "assistant" for message in messages[self.prefix :])
        is_follow_up = self.answer_count > 0 and (has_history if continues is None else continues)
        system = [] if without_context else [{"role": "system", "content": self.system()}]
        for number in range(TRIES):
            request = Request(
                self.conversation,
                [*system, *self.rewrite(messages)],
                is_follow_up,
                client=self.client,
                tools=[] if without_context else self.tools,
                temperature=self.user.profile.temperature,
                timeout_s=TIMEOUT_S if number else patience_s,
                **options,
            )
            message = await self._try(request)
            if message is not None:
                self.answer_count += request.answer is not None
                await self.user.think()
                return message
            await self.user.think()
        raise RequestLost(f"{self.conversation} got no answer in {TRIES} tries")

    async def _try(self, request: Request) -> Message | None:
        self.user.ledger.requests.append(request)
        CURRENT.set(request)
        try:
            return await self.user.clients.by_name[self.client].complete(request)
        except (openai.APITimeoutError, openai.InternalServerError, anthropic.InternalServerError):
            return None
        except (openai.APIConnectionError, anthropic.APIConnectionError):
            await self.user.router_up.wait()
            return None
        finally:
            request.ended_at = monotonic()
