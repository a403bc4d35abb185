"""Redact exchanges and imported records before they are stored: patterns in any text, and fields by name.

Patterns are applied to the assembled text: a streamed answer is assembled first, so that a match across two chunks is
found. Fields are searched in arguments, results and contents, and in a request's keys beyond the protocol (``user``,
``metadata``). Keys of the protocol are not redacted as fields, and tool definitions are redacted by patterns only,
because they hold names of fields but no values. The data that the client and the engine receive is not changed.

With a key, each match and each text or number in a field becomes a pseudonym, such as ``[redacted-kqzmdwbt]``. The same
text always has the same one, so that an object that is looked up in one call is the same object in another. Who lacks
the key cannot verify a guess. Everybody can see which places had the same text.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from store.records import Exchange
from traced.core.fast_json import read_json, write_json
from traced.ingest.responses import Form, form_of_line, messages_of, read_answer, read_stream, tools_of

REDACTED = "[redacted]"
# Letters only, so that patterns of numbers do not match within a pseudonym.
PSEUDONYM_LETTERS = "abcdefghijklmnopqrstuvwxyz"
PSEUDONYM_LENGTH = 8
# What text and names that were redacted have in their place.
PLACEHOLDER = re.compile(r"\[redacted(-[a-z]{8}|-[0-9a-f]{12})?\]")
# Maximum depth to which a value is searched; deeper values are redacted as a whole.
MAX_DEPTH = 150

# Keys of the protocol, each with the protocol's keys inside its value.
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
# In a tool's message "name" is the name of the tool. In other messages it names a person and may be a field to redact.
TOOL_MESSAGE: Keys = {**MESSAGE, "name": NO_KEYS}
# The fields of all forms that become messages.
CONTENT_FIELDS = ("messages", "input", "prompt", "instructions", "system")
DEFINITION_FIELDS = ("functions", "tool_choice", "response_format")


class Redactor:
    """Redacts by patterns (regular expressions) and by names of fields; falsy if it has neither.

    Args:
        key: The key of the pseudonyms; without one every match becomes ``REDACTED``.

    Raises:
        ValueError: A pattern is not a valid regular expression.
    """

    def __init__(self, patterns: Sequence[str], fields: Collection[str], key: bytes = b"") -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._fields = frozenset(fields)
        self._key = key
        self._by_pattern: Redactor = Redactor(patterns, (), key) if self._fields else self

    def __bool__(self) -> bool:
        return bool(self._patterns or self._fields)

    def line(self, line: bytes) -> bytes:
        """Return a redacted copy of a line of the spool."""
        return write_json(self._line(read_json(line))) + b"\n"

    def exchange(self, exchange: Exchange) -> Exchange:
        """Return a redacted copy of an exchange that has a body."""
        body = exchange.body or {}
        redacted_messages = {name: self.messages(body[name]) for name in ("messages", "answer")}
        body = {**body, **redacted_messages, "tools": self.definitions(body["tools"])}
        return replace(exchange, body=body, detail=self.text(exchange.detail))

    def messages(self, value: object) -> Any:
        """Return redacted copies of one message or several, without changes to the protocol's fields."""
        if isinstance(value, list):
            return [self._message(message) for message in value]
        return self._message(value)

    def is_redacted(self, messages: Sequence[Any]) -> bool:
        """Return whether stored messages have nothing to redact but what has been redacted already."""
        texts = (json.dumps(value) for value in (messages, self.messages(messages)))
        return len({PLACEHOLDER.sub("", text) for text in texts}) == 1

    def definitions(self, value: object) -> Any:
        """Return redacted copies of tool definitions; only patterns apply to them."""
        return self._by_pattern.value(value)

    def value(self, value: object) -> Any:
        """Return a JSON value with every matching text and field redacted."""
        return self._redact(value, NO_KEYS)

    def name(self, text: str) -> str:
        """Replace every match in an id or a name by a short hash, so that different names stay different.

        The hash does not keep the match secret: a person who guesses the match can verify the guess.
        """
        for pattern in self._patterns:
            text = pattern.sub(_hashed, text)
        return text

    def text(self, text: str) -> str:
        """Return the text with every match of a pattern redacted."""
        for pattern in self._patterns:
            text = pattern.sub(lambda match: self._pseudonym(match[0]), text)
        return text

    def _pseudonym(self, text: str) -> str:
        if not text or not self._key:
            return REDACTED
        number = int.from_bytes(hmac.digest(self._key, text.encode("utf-8", "surrogatepass"), hashlib.sha256))
        letters = ""
        for _ in range(PSEUDONYM_LENGTH):
            number, letter = divmod(number, len(PSEUDONYM_LETTERS))
            letters += PSEUDONYM_LETTERS[letter]
        return f"[redacted-{letters}]"

    def _field(self, value: object) -> str:
        # The few values of other types could be told apart by how often they occur.
        is_named = isinstance(value, str | int | float) and not isinstance(value, bool)
        return self._pseudonym(str(value)) if is_named else REDACTED

    def _line(self, line: dict[str, Any]) -> dict[str, Any]:
        # Whatever its form, the request is stored in the chat form, whose fields this module knows.
        request, form = self._request(line["request"], form_of_line(line)), Form.CHAT
        return {**line, "request": request, "form": form, "detail": self.text(line["detail"]), **self._answer(line)}

    def _message(self, value: object) -> Any:
        speaks = isinstance(value, dict) and value.get("role") in ("user", "system", "developer", "assistant")
        return self._redact(value, MESSAGE if speaks else TOOL_MESSAGE)

    def _request(self, request: object, form: Form) -> Any:
        if not isinstance(request, dict):
            return self.value(request)
        protocol = {
            "messages": self.messages(messages_of(request, form)),
            "tools": self.definitions(tools_of(request, form)),
            **{name: self.definitions(request[name]) for name in DEFINITION_FIELDS if name in request},
        }
        rest = {key: value for key, value in request.items() if key not in CONTENT_FIELDS and key not in protocol}
        return {**self._redact(rest, {"model": NO_KEYS}), **protocol}

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
                key: self._field(item) if key in hidden else self._redact(item, keys.get(key, NO_KEYS), depth + 1)
                for key, item in value.items()
            }
        return value

    def _maybe_json(self, text: str, depth: int) -> str:
        # Arguments and results of tools are JSON text, which may have fields to redact as well.
        if self._fields and text[:1] in ("{", "["):
            try:
                value = json.loads(text)
                redacted = self._redact(value, NO_KEYS, depth)
                return self.text(text if redacted == value else json.dumps(redacted, ensure_ascii=False))
            except ValueError:
                pass
            except RecursionError:
                return REDACTED
        return self.text(text)

    def _answer(self, line: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            # The answer is an error of the engine or has an unknown form.
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
