"""Requests answers in a JSON schema, and parses them.

The schema is sent as ``response_format``, as a tool or in the prompt, whichever the server supports; what it supports
is learned once per process (``ServerCapabilities``). Parameters are those of OpenAI's chat completions, which vLLM,
llama.cpp and others implement in part.

The parser accepts exactly one JSON object, also inside prose, in code fences or after reasoning. It tolerates trailing
commas and no other errors. Duplicate keys, NaN and truncated objects raise ``Unreadable``.
"""

import functools
import json
import re
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import NoReturn

from agents.llm.question import ChatMessage, Question

Schema = dict[str, object]

OUTPUT_MODES = ("json_schema", "tool call", "JSON in text")
PROMPT_MODE = len(OUTPUT_MODES) - 1
# The mode of a reply that came from the ledger.
NO_MODE = -1
# Parameters that a request can omit; ``max_completion_tokens`` is then sent under its older name ``max_tokens``.
OPTIONAL_PARAMETERS = ("stream_options", "temperature", "max_completion_tokens")
# Statuses of servers that do not understand a request.
NOT_THIS_WAY = (400, 415, 422, 501)
TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size|limit)|maximum.{0,20}context|max_model_len|too many tokens|prompt is too long"
    r"|context_length_exceeded|string_above_max_length",
    re.IGNORECASE,
)
THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
# The opening brace of a JSON object, not of a set in prose.
OBJECT_START = re.compile(r'\{\s*["}]')
STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
# Longer answers are not parsed.
MAX_CHARACTERS = 4_000_000


@dataclass
class ServerCapabilities:
    """What an endpoint supports: the first output mode that it does not refuse, and the parameters it rejects."""

    mode: int = 0
    confirmed: bool = False
    unsupported: set[str] = field(default_factory=set)

    def record_success(self, mode: int) -> None:
        """Record that a valid answer arrived in this mode; later requests use the first mode recorded here."""
        if not self.confirmed and mode != NO_MODE:
            self.mode, self.confirmed = mode, True

    def record_failure(self, mode: int) -> None:
        """Record that an invalid answer arrived in this mode; unless the mode has worked before, switch to the next."""
        if not self.confirmed and mode == self.mode:
            self.mode = min(mode + 1, PROMPT_MODE)


@functools.cache
def server_capabilities(base_url: str, model: str) -> ServerCapabilities:
    """Return the capabilities of an endpoint, one object for the whole process."""
    return ServerCapabilities()


def unsupported_parameter(param: str, complaint: str, unsupported: Set[str]) -> str:
    """Return the optional parameter that the server complains about, empty if there is none.

    Args:
        param: the parameter that the error names in its field, empty if only the text ``complaint`` may name it.
        unsupported: parameters already known to be rejected; they are not returned.
    """
    candidates = [name for name in OPTIONAL_PARAMETERS if name not in unsupported]
    return next((name for name in candidates if (name == param if param else name in complaint)), "")


def request_body(question: Question, form: Schema | None, mode: int, unsupported: Set[str]) -> dict[str, object]:
    """Return the fields of a request besides the messages."""
    limit = "max_tokens" if "max_completion_tokens" in unsupported else "max_completion_tokens"
    body: dict[str, object] = {limit: question.max_tokens}
    if "stream_options" not in unsupported:
        body["stream_options"] = {"include_usage": True}
    if "temperature" not in unsupported:
        body["temperature"] = question.temperature
    if form is not None and OUTPUT_MODES[mode] == "json_schema":
        schema = {"name": _name(form), "schema": form, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif form is not None and OUTPUT_MODES[mode] == "tool call":
        function = {"name": _name(form), "description": "Give your answer.", "parameters": form}
        body["tools"] = [{"type": "function", "function": function}]
        body["tool_choice"] = {"type": "function", "function": {"name": _name(form)}}
    return body


def with_schema_prompt(messages: tuple[ChatMessage, ...], form: Schema | None, mode: int) -> tuple[ChatMessage, ...]:
    """Return the messages; in prompt mode the schema is appended to the last one."""
    if form is None or mode != PROMPT_MODE:
        return messages
    instruction = f"Answer with one JSON object and no other words. It fits this JSON Schema:\n{json.dumps(form)}"
    return (*messages[:-1], replace(messages[-1], text=f"{messages[-1].text}\n\n{instruction}"))


def _name(form: Schema) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", str(form.get("title", "answer")))[:64] or "answer"


class Unreadable(ValueError):
    """The answer does not hold exactly one JSON object."""


def parse_object(answer: str) -> dict[str, object]:
    """Return the only JSON object of an answer; raises ``Unreadable``."""
    if len(answer) > MAX_CHARACTERS:
        raise Unreadable(f"the answer has {len(answer)} characters, which is too long")
    text = THOUGHTS.sub("", answer, count=1).strip()
    start = OBJECT_START.search(text)
    if start is None or text.startswith("["):
        raise Unreadable("there is no JSON object in the answer")
    text = text[start.start() :]
    try:
        objects = _objects(text)
    except Unreadable:
        # Removing trailing commas is the only repair that cannot change a value.
        objects = _objects(STRING_OR_COMMA.sub(lambda matched: matched.group(1) or "", text))
    if len(objects) > 1:
        raise Unreadable(f"there are {len(objects)} JSON objects in the answer; give one")
    return objects[0]


def _objects(text: str) -> list[dict[str, object]]:
    """Return all objects of a text that starts with one; raises ``Unreadable`` at the first that cannot be parsed."""
    objects = []
    start = OBJECT_START.search(text)
    while start is not None:
        try:
            value, end = DECODER.raw_decode(text, start.start())
        except RecursionError:
            raise Unreadable("the JSON is nested too deeply") from None
        except ValueError as error:
            raise Unreadable(f"the JSON cannot be read: {error}") from None
        objects.append(value)
        start = OBJECT_START.search(text, end)
    return objects


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping: dict[str, object] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"the key {key!r} is there twice")
        mapping[key] = value
    return mapping


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_reject_constant)
