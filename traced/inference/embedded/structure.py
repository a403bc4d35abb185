"""Answers that match a JSON schema: of ``response_format``, or of the call of a tool that ``tool_choice`` demands.

Before each token the library llguidance (the extra ``structured``) tells which tokens can lead to a valid answer; all
others get the probability 0. The answer ends when it is complete. A forced call is written as JSON, between the tags of
the model's own calls if these are JSON too. Errors: ``RequestError`` for a schema that cannot be used, or if llguidance
is not installed. Not covered: several calls in one forced answer; thinking before an answer that has to match.
"""

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sandbox.contract import Message, Tool
from traced.inference.errors import RequestError
from traced.inference.generation import Tokenizer

# The tool parsers whose calls are JSON between these tags.
TAGS = {"hermes": ("<tool_call>\n", "\n</tool_call>")}
# As models write JSON; with free white space small models write nothing else.
LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS = ("$defs", "definitions")
MISSING = (
    "response_format and a forced tool_choice need llguidance on the embedded engine: "
    "pip install 'traced[structured]', or serve with vLLM"
)


class Constraint:
    """The state of one answer that has to match a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self, vocabulary: int) -> Tensor:
        """Return which tokens may come next, bool [vocabulary]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[:vocabulary].astype(bool))

    def consume(self, token: int) -> None:
        """Take the next token of the answer."""
        self._matcher.consume_token(token)


class Constraints:
    """Makes the constraints of one tokenizer.

    Args:
        tokenizer: A fast tokenizer of Hugging Face.
        vocabulary: The number of logits.
        stops: The token ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stops: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._stops = tokenizer, vocabulary, sorted(stops)
        self._lock = threading.Lock()
        self._tokens: Any = None

    def constraint(self, grammar: str) -> Constraint:
        """Return the constraint for a grammar; the first call takes about a second."""
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise RequestError(MISSING) from error
        with self._lock:
            if self._tokens is None:
                self._tokens = llguidance.hf.from_tokenizer(self._tokenizer, self._vocabulary, self._stops)
        matcher = llguidance.LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the JSON schema cannot be used: {matcher.get_error()}")
        return Constraint(matcher)


def constrain(logits: Tensor, constraints: Sequence[Constraint | None]) -> None:
    """Set the logits [n, vocabulary] of forbidden tokens to -inf, in place."""
    for row, constraint in enumerate(constraints):
        if constraint is not None:
            logits[row].masked_fill_(~constraint.allowed(logits.shape[-1]).to(logits.device), -torch.inf)


def grammar_of(schema: Mapping[str, Any], tags: tuple[str, str] = ("", "")) -> str:
    """Return the grammar of JSON that matches a schema, between two texts."""
    prefix, suffix = (json.dumps(tag) if tag else "" for tag in tags)
    return f"start: {prefix} answer {suffix}\nanswer: %json {json.dumps({**schema, 'x-guidance': LAYOUT})}"


def format_schema(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the JSON schema that ``response_format`` demands, None for free text; raises ``RequestError``."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    definition = response_format.get("json_schema")
    schema = definition.get("schema") if isinstance(definition, Mapping) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestError("response_format must be text, json_object or a json_schema with a schema")
    return schema


def forced_tools(choice: object, tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools of which ``tool_choice`` demands a call, none if it does not.

    Raises:
        RequestError: The choice is of an unknown form, or names a tool that is not offered.
    """
    if choice in (None, "auto", "none"):
        return []
    if choice == "required":
        demanded_tools = list(tools)
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        name = (choice.get("function") or {}).get("name")
        demanded_tools = [tool for tool in tools if tool["function"].get("name") == name]
    else:
        raise RequestError(f"tool_choice={choice!r} is not supported; use 'auto', 'none', 'required' or a function")
    if not demanded_tools:
        raise RequestError(f"tool_choice={choice!r} demands a tool that the request does not offer")
    return demanded_tools


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools; raises ``RequestError``."""
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool["function"].get("parameters") or {"type": "object"})
        # References in the parameters start from the root of the whole schema.
        for group in DEFINITIONS:
            for name, definition in (parameters.pop(group, None) or {}).items():
                if definitions.setdefault(group, {}).setdefault(name, definition) != definition:
                    raise RequestError(f"two tools define {name!r} differently in {group}")
        properties = {"name": {"const": tool["function"]["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": list(properties)})
    return {"anyOf": calls, **definitions}


def closed(schema: Any) -> Any:
    """Return the schema with no properties but the named ones in its objects, unless it says otherwise.

    Without this, small models invent properties without end. vLLM's default grammars do the same.
    """
    if not isinstance(schema, dict):
        return schema
    # Each part of allOf names only some of the properties.
    result = {key: value if key == "allOf" else _closed_parts(key, value) for key, value in schema.items()}
    if "properties" in schema and not {"additionalProperties", "patternProperties", "allOf"} & schema.keys():
        result["additionalProperties"] = False
    return result


def _closed_parts(key: str, value: Any) -> Any:
    if key in ("properties", *DEFINITIONS) and isinstance(value, dict):
        return {name: closed(part) for name, part in value.items()}
    if key in ("anyOf", "oneOf", "prefixItems") and isinstance(value, list):
        return [closed(part) for part in value]
    return closed(value) if key == "items" else value


def forced_call(text: str, number: int, tags: tuple[str, str] = ("", "")) -> Message:
    """Return the message with the call that is in an answer's text; an answer that was cut off stays text."""
    try:
        call = json.loads(text.removeprefix(tags[0]).removesuffix(tags[1]))
    except ValueError:
        return {"role": "assistant", "content": text}
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
