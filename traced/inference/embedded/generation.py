"""Between OpenAI chat messages and tokens: render a conversation, parse an answer.

Rendering is the tokenizer's own chat template, with tool-call arguments given as dicts, as Qwen's and Hermes' templates
expect. Parsing knows the Hermes form, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several allowed,
text around them kept as content. Invariant: ``parse`` never raises; an answer with one malformed call is plain content
as a whole, so that nothing half-understood reaches a tool.

What goes into the embedded engine and what comes out: plain types, no torch.

Invariant: the same ``Request`` gives the same ``Generation`` whatever else is in the batch, up to float rounding: a
seeded request draws its own random numbers.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)


def render(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of the conversation with the generation prompt at the end."""
    ids: list[int] = tokenizer.apply_chat_template(
        [_for_template(message) for message in messages],
        tools=list(tools) or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return ids


def parse(text: str, *, first_call: int = 0) -> dict[str, Any]:
    """The assistant message in an answer's text; its calls get ids ``call_<n>`` counting from ``first_call``."""
    calls = [_call(body) for body in _CALL.findall(text)]
    rest = _CALL.sub("", text)
    if not calls or None in calls or OPEN in rest or CLOSE in rest:
        return {"role": "assistant", "content": text.strip()}
    tool_calls = [
        {"id": f"call_{first_call + i}", "type": "function", "function": call} for i, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": rest.strip() or None, "tool_calls": tool_calls}


def count_calls(messages: Sequence[dict[str, Any]]) -> int:
    """Tool calls made so far in a conversation; the next one's number."""
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


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    shown = {**message, "content": _text(message.get("content"))}
    if message.get("tool_calls"):
        shown["tool_calls"] = [_with_dict_arguments(call) for call in message["tool_calls"]]
    return shown


def _with_dict_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except ValueError:
            return {**call, "function": function}
    return {**call, "function": function}


def _text(content: Any) -> str:
    """Content as text: null is empty, a list of parts is joined (text parts only)."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return content or ""


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens: ``temperature`` 0 is greedy, ``seed`` None draws a fresh one.

    One of the texts in ``stop`` ends the answer; the tokens that spell it are still part of it.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    seed: int | None = None
    top_logprobs: int = 0  # how many of the most likely tokens to report per step
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One completion to make. ``adapter`` None is the base model (in the trainer: the live model as it is)."""

    prompt_ids: list[int]
    sampling: Sampling
    adapter: str | None = None


@dataclass(frozen=True)
class Generation:
    """Sampled tokens, the end-of-turn token included.

    ``logprobs[i]`` (nats) is that of ``ids[i]`` under softmax(logits / T), or under plain softmax for T = 0; ``top[i]``
    maps the most likely token ids to their log-probs under the same distribution. ``finish_reason``: "stop" | "length".
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    top: list[dict[int, float]] = field(default_factory=list)
