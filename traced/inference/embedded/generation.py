"""Render conversations to tokens and parse completions to messages; the types of requests and results.

Tool calls are parsed in the Hermes form, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Several calls
are allowed, and the text around them is content. ``parse`` never raises: a completion with a malformed call becomes
plain content as a whole, so that no partly parsed call reaches a tool. This module does not import torch.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandbox.contract import Message, Tool

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the embedded engine uses."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: list[Message], **options: Any) -> Any:
        """Render a conversation as text, or as token ids with the option ``tokenize=True``."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of the token ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the token ids by token."""
        ...


def render(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    """Return the token ids of the conversation with the generation prompt at the end."""
    ids: list[int] = tokenizer.apply_chat_template(
        [_for_template(message) for message in messages],
        tools=list(tools) or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return ids


def parse(text: str, *, first_call: int = 0) -> Message:
    """Parse a completion's text into an assistant message, with call ids ``call_<n>`` from ``first_call`` on."""
    calls = [_call(body) for body in _CALL.findall(text)]
    content = _CALL.sub("", text)
    if not calls or None in calls or OPEN in content or CLOSE in content:
        return {"role": "assistant", "content": text.strip()}
    tool_calls = [
        {"id": f"call_{first_call + i}", "type": "function", "function": call} for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content.strip() or None, "tool_calls": tool_calls}


def count_calls(messages: Sequence[Message]) -> int:
    """Return the number of tool calls in a conversation, which is also the number of its next call (from 0)."""
    return sum(len(message.get("tool_calls") or []) for message in messages)


def _call(body: str) -> dict[str, str] | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}


def _for_template(message: Message) -> Message:
    template_message = {**message, "content": _text(message.get("content"))}
    # Qwen's and Hermes' templates expect arguments as dicts.
    if message.get("tool_calls"):
        template_message["tool_calls"] = [_with_dict_arguments(call) for call in message["tool_calls"]]
    return template_message


def _with_dict_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError:
            return {**call, "function": function}
    return {**call, "function": function}


def _text(content: str | list[object] | None) -> str:
    """Return the text of a message's content; of a list of parts, only the text parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Args:
        temperature: 0 means greedy sampling.
        max_tokens: Maximum number of tokens to sample.
        seed: None means a fresh seed.
        top_logprobs: The number of likeliest tokens to report per step.
        stop: Texts that end the completion; their tokens are still part of it.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    top_logprobs: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """A completion request; without an adapter the base model serves it (in the trainer: the live model).

    The same request gives the same ``Generation`` whatever else is in the batch, up to float rounding.
    """

    prompt_ids: list[int]
    sampling: Sampling
    adapter: str | None = None


@dataclass(frozen=True)
class Generation:
    """The result of a request.

    Args:
        ids: The sampled tokens, with the end-of-turn token if it was sampled.
        logprobs: The log-probs of ``ids`` in nats, under softmax(logits / T), or the plain softmax for T = 0.
        finish_reason: "stop" or "length".
        top: Per token, the likeliest token ids with their log-probs under the same distribution.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top: list[dict[int, float]] = field(default_factory=list)
