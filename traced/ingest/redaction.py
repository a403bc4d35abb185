"""Redaction of exchanges and imported records before they are stored: patterns in any text, and fields by name.

Patterns see what a person would read: a streamed answer is assembled first, so that a match across two chunks is found.
Fields are looked for in arguments, results and contents, and in what a request has besides the protocol (``user``,
``metadata``). Keys of the protocol are not fields, and tool definitions hold names of fields but no values. What the
client and the engine receive is not changed. Raises ``ValueError`` for an invalid regular expression.
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
# Levels of a value that are searched; deeper values are redacted as a whole.
MAX_DEPTH = 150

# Keys of the protocol, each with the keys of the protocol inside its value.
Keys = Mapping[str, Any]
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
# In a tool's message "name" is the tool; in other messages it is a person, and may be a field to redact.
TOOL_MESSAGE: Keys = {**MESSAGE, "name": NO_KEYS}
# Where a request of the chat, the responses and the completions form holds its messages.
MESSAGE_FIELDS = ("messages", "input", "prompt")
DEFINITION_FIELDS = ("tools", "functions", "tool_choice", "response_format")


class Redactor:
    """Redacts by patterns (regular expressions) and by names of fields; falsy where it has neither."""

    def __init__(self, patterns: Sequence[str], fields: Collection[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._fields = frozenset(fields)
        self._by_pattern: Redactor = Redactor(patterns, ()) if self._fields else self

    def __bool__(self) -> bool:
        return bool(self._patterns or self._fields)

    def line(self, line: bytes) -> bytes:
        """Redact a line of the spool."""
        return write_json(self._line(read_json(line))) + b"\n"

    def exchange(self, exchange: Exchange) -> Exchange:
        """Redact an exchange that has a body."""
        body = exchange.body or {}
        redacted_messages = {name: self.messages(body[name]) for name in ("messages", "answer")}
        body = {**body, **redacted_messages, "tools": self.definitions(body["tools"])}
        return replace(exchange, body=body, detail=self.text(exchange.detail))

    def messages(self, value: object) -> Any:
        """Redact one message or several without changing the keys of the protocol."""
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return self._message(value)

    def definitions(self, value: object) -> Any:
        """Redact tool definitions: by patterns only."""
        return self._by_pattern.value(value)

    def value(self, value: object) -> Any:
        """Redact every text and field in a JSON value."""
        return self._redact(value, NO_KEYS)

    def name(self, text: str) -> str:
        """Replace every match in an id or a name by a short hash, so that different names stay different.

        The hash is not secret: whoever can guess the match can check the guess.
        """
        for pattern in self._patterns:
            text = pattern.sub(_hashed, text)
        return text

    def text(self, text: str) -> str:
        """Redact every match in a text."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def _line(self, line: dict[str, Any]) -> dict[str, Any]:
        return {
            **line,
            "request": self._request(line["request"]),
            "detail": self.text(line["detail"]),
            **self._answer(line),
        }

    def _message(self, value: object) -> Any:
        speaks = isinstance(value, dict) and value.get("role") in ("user", "system", "developer", "assistant")
        return self._redact(value, MESSAGE if speaks else TOOL_MESSAGE)

    def _request(self, request: object) -> Any:
        if not isinstance(request, dict):
            return self.value(request)
        forms = dict.fromkeys(MESSAGE_FIELDS, self.messages) | dict.fromkeys(DEFINITION_FIELDS, self.definitions)
        protocol = {key: redact(request[key]) for key, redact in forms.items() if key in request}
        rest = {key: value for key, value in request.items() if key not in protocol}
        return {**self._redact(rest, {"model": NO_KEYS, "instructions": NO_KEYS}), **protocol}

    def _redact(self, value: object, keys: Keys, depth: int = 0) -> Any:
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
        # Arguments and results of tools are JSON in a text, and have fields as well.
        if self._fields and text[:1] in ("{", "["):
            try:
                return self.text(json.dumps(self._redact(json.loads(text), NO_KEYS, depth), ensure_ascii=False))
            except ValueError:
                pass
            except RecursionError:
                return REDACTED
        return self.text(text)

    def _answer(self, line: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            # An error of the engine, or not an answer at all.
            return {"answer": self.text(line["answer"])}
        if answer.message is None:
            return {"answer": self.text(line["answer"]) if line["status"] != 200 else "{}", "streamed": False}
        choices = [{"message": self.messages(answer.message)}]
        response = {"id": answer.id, "choices": choices, "usage": answer.usage}
        return {"answer": write_json(response).decode(), "streamed": False}


def _hashed(match: re.Match[str]) -> str:
    if not match[0]:
        return ""
    return f"[redacted-{hashlib.sha256(match[0].encode('utf-8', 'surrogatepass')).hexdigest()[:12]}]"
