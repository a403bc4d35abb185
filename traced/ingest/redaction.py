"""What must not be stored is taken out before anything is: patterns in any text, and whole fields by their names.

Invariants: rules see what a person would read, so a streamed answer is put together first: a pattern that falls into
two pieces of a stream is found. Fields are those of arguments, results and contents, and what a request says beside the
protocol (``user``, ``metadata``); keys of the protocol are none, and the definitions of tools have none, because they
name fields and hold no values. A message's ``name`` is one where a person speaks. What the client and the engine get is
not touched. Fails: ``ValueError`` for a pattern that is no regular expression (when the settings are read).
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from store.records import Exchange
from traced.core.fast_json import read_json, write_json
from traced.ingest.responses import read_answer, read_stream

REDACTED = "[redacted]"
MAX_DEPTH = 150  # levels of a value that are looked into; what lies deeper is taken out whole

Keys = Mapping[str, Any]  # keys that are the protocol's, each with those of what is below it
NO_KEYS: Keys = {}
CALL: Keys = {"name": NO_KEYS, "arguments": NO_KEYS, "input": NO_KEYS}
MESSAGE: Keys = {
    **dict.fromkeys(
        ("role", "type", "id", "call_id", "tool_call_id", "status", "refusal", "arguments", "output"), NO_KEYS
    ),
    "content": {"type": NO_KEYS, "text": NO_KEYS},
    "tool_calls": {"id": NO_KEYS, "type": NO_KEYS, "index": NO_KEYS, "function": CALL, "custom": CALL},
    "function_call": CALL,
}
TOOL_MESSAGE: Keys = {**MESSAGE, "name": NO_KEYS}  # a tool's or a function's
MESSAGE_FIELDS = ("messages", "input", "prompt")  # of a request, by its form
DEFINITION_FIELDS = ("tools", "functions", "tool_choice", "response_format")


class Redactor:
    """Applies patterns (regular expressions) and the names of fields; falsy where there is nothing to apply."""

    def __init__(self, patterns: Sequence[str], fields: Collection[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._fields = frozenset(fields)
        self._by_pattern: Redactor = Redactor(patterns, ()) if self._fields else self

    def __bool__(self) -> bool:
        return bool(self._patterns or self._fields)

    def line(self, line: bytes) -> bytes:
        """A line of the spool without what must not be stored."""
        return write_json(self._line(read_json(line))) + b"\n"

    def exchange(self, exchange: Exchange) -> Exchange:
        """An exchange that has its body, without what must not be stored."""
        body = exchange.body or {}
        redacted_messages = {name: self.messages(body[name]) for name in ("messages", "answer")}
        body = {**body, **redacted_messages, "tools": self.definitions(body["tools"])}
        return replace(exchange, body=body, detail=self.text(exchange.detail))

    def messages(self, value: Any) -> Any:
        """Messages, or one, that keep their form."""
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return self._message(value)

    def _message(self, value: Any) -> Any:
        speaks = isinstance(value, dict) and value.get("role") in ("user", "system", "developer", "assistant")
        return self._redact(value, MESSAGE if speaks else TOOL_MESSAGE)

    def definitions(self, value: Any) -> Any:
        """The definitions of tools: patterns only."""
        return self._by_pattern.value(value)

    def _line(self, line: dict[str, Any]) -> dict[str, Any]:
        return {
            **line,
            "request": self._request(line["request"]),
            "detail": self.text(line["detail"]),
            **self._answer(line),
        }

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted."""
        return self._redact(value, NO_KEYS)

    def name(self, text: str) -> str:
        """An id or a person's name: a short hash of it stands for every match, so that two of them stay two.

        Whoever can guess what was there can check the guess.
        """
        for pattern in self._patterns:
            text = pattern.sub(_hashed, text)
        return text

    def text(self, text: str) -> str:
        """A text with every match replaced."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def _request(self, request: Any) -> Any:
        if not isinstance(request, dict):
            return self.value(request)
        forms = dict.fromkeys(MESSAGE_FIELDS, self.messages) | dict.fromkeys(DEFINITION_FIELDS, self.definitions)
        told = {key: redacted(request[key]) for key, redacted in forms.items() if key in request}
        rest = {key: value for key, value in request.items() if key not in told}
        return {**self._redact(rest, {"model": NO_KEYS, "instructions": NO_KEYS}), **told}

    def _redact(self, value: Any, keys: Keys, depth: int = 0) -> Any:
        """A value whose ``keys`` are no fields."""
        if isinstance(value, str):
            return self._maybe_json(value, depth)
        if isinstance(value, list | dict) and depth == MAX_DEPTH:
            return REDACTED
        if isinstance(value, list):
            return [self._redact(item, keys, depth + 1) for item in value]
        if isinstance(value, dict):
            hidden = self._fields.difference(keys)
            return {
                key: REDACTED if key in hidden else self._redact(item, keys.get(key, NO_KEYS), depth + 1)
                for key, item in value.items()
            }
        return value

    def _maybe_json(self, text: str, depth: int) -> str:
        """Arguments and results of tools are JSON in a text: fields are looked for in them too."""
        if self._fields and text[:1] in ("{", "["):
            try:
                return self.text(json.dumps(self._redact(json.loads(text), NO_KEYS, depth), ensure_ascii=False))
            except ValueError:
                pass
            except RecursionError:
                return REDACTED  # too deep to be read at all
        return self.text(text)

    def _answer(self, line: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            return {"answer": self.text(line["answer"])}
        if answer.message is None:
            return {"answer": self.text(line["answer"]) if line["status"] != 200 else "{}", "streamed": False}
        choices = [{"message": self.messages(answer.message)}]
        response = {"id": answer.id, "choices": choices, "usage": answer.usage}
        return {"answer": write_json(response).decode(), "streamed": False}


def _hashed(match: re.Match[str]) -> str:
    return (
        f"[redacted-{hashlib.sha256(match[0].encode('utf-8', 'surrogatepass')).hexdigest()[:12]}]" if match[0] else ""
    )
