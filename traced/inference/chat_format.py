"""Render conversations to tokens, and parse completions to messages: the chat format of one model.

``ChatFormat`` is the interface; engines, policies and the trainer use nothing else.

Tool calls are parsed in the Hermes form, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. Several calls
are allowed, and the text around them is content. ``parse`` never raises: a completion with a malformed call becomes
plain content as a whole, so that no partly parsed call reaches a tool. This module does not import torch.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sandbox.contract import Message, Tool
from traced.inference.errors import ModelError, TemplateError
from traced.inference.generation import Tokenizer

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)


# Rendered with and without new messages to find the tokens that the template puts around them.
DUMMY: list[Message] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]


class ChatFormat:
    """The chat template and the response format of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Return the token ids that end an assistant turn."""
        return () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)

    @property
    def tool_parser(self) -> str:
        """Return the name of vLLM's parser of tool calls."""
        return "hermes"

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the token ids of the conversation with the generation prompt at the end."""
        return render(self.tokenizer, messages, tools)

    def parse(self, ids: Sequence[int], *, first_call: int = 0) -> Message:
        """Parse a completion into an assistant message, with call ids ``call_<n>`` from ``first_call`` on."""
        return parse(self.tokenizer.decode(list(ids), skip_special_tokens=True), first_call=first_call)


def load_chat_format(model_dir: Path) -> ChatFormat:
    """Return the chat format of a Hugging Face model directory; raises ``ModelError`` if it has none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {model_dir} cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"the model in {model_dir} has no chat template", hint="use an instruct model")
    return ChatFormat(tokenizer)


class TurnFormat:
    """Continues conversations token by token: the tokens between a sampled answer and the next one.

    Raises:
        TemplateError: The chat template does not allow it.
    """

    def __init__(self, chat_format: ChatFormat) -> None:
        self.chat_format = chat_format
        tokenizer: Any = chat_format.tokenizer
        self.end: int = tokenizer.eos_token_id
        rendered = tokenizer.apply_chat_template(DUMMY, tokenize=True, return_dict=False)
        if self.end not in rendered:
            raise TemplateError(
                f"the chat template does not end a turn with EOS ({tokenizer.eos_token!r}); "
                "token-exact training needs that",
                hint="choose a model with a ChatML-like template",
            )
        self.prefix = rendered[: len(rendered) - rendered[::-1].index(self.end)]
        # Only a check: a template that rewrites history fails now, not after the first rollouts.
        self.between([{"role": "user", "content": "u"}])

    def between(self, messages: list[Message]) -> list[int]:
        """Return what follows an answer's end-of-turn token: ``messages`` and the next generation prompt."""
        full = self.chat_format.render(DUMMY + messages, [])
        if full[: len(self.prefix)] != self.prefix:
            raise TemplateError(
                "the chat template renders earlier turns differently once later ones follow; "
                "token-exact training needs a template that only appends",
                hint="choose a model whose template keeps history as it is",
            )
        return full[len(self.prefix) :]


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
