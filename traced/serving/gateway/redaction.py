"""What must not be stored is taken out before anything is: patterns in any text, and whole fields by their names.

Invariants: rules see what a person would read, so a streamed answer is put together first: a pattern that falls into
two pieces of a stream is found. What the client and the engine get is not touched. Fails: ``ValueError`` for a pattern
that is no regular expression (when the settings are read).
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from store.serving_records import Exchange
from traced.serving.gateway.fast_json import read_json, write_json
from traced.serving.gateway.reading import read_answer, read_stream

GONE = "[redacted]"


class Redactor:
    """Applies patterns (regular expressions) and the names of fields; falsy where there is nothing to apply."""

    def __init__(self, patterns: Sequence[str], fields: Collection[str]) -> None:
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._fields = frozenset(fields)

    def __bool__(self) -> bool:
        return bool(self._patterns or self._fields)

    def line(self, line: bytes) -> bytes:
        """A line of the spool without what must not be stored."""
        return write_json(self._line(read_json(line))) + b"\n"

    def exchange(self, exchange: Exchange) -> Exchange:
        """An exchange that has its body, without what must not be stored."""
        return replace(exchange, body=self.value(exchange.body), detail=self.text(exchange.detail))

    def _line(self, line: dict[str, Any]) -> dict[str, Any]:
        return {
            **line,
            "request": self.value(line["request"]),
            "detail": self.text(line["detail"]),
            **self._answer(line),
        }

    def value(self, value: Any) -> Any:
        """A JSON value with every text in it redacted."""
        if isinstance(value, str):
            return self._maybe_json(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {key: GONE if key in self._fields else self.value(item) for key, item in value.items()}
        return value

    def text(self, text: str) -> str:
        """A text with every match replaced."""
        for pattern in self._patterns:
            text = pattern.sub(GONE, text)
        return text

    def _maybe_json(self, text: str) -> str:
        """Arguments and results of tools are JSON in a text: fields are looked for in them too."""
        if self._fields and text[:1] in ("{", "["):
            try:
                return self.text(json.dumps(self.value(json.loads(text)), ensure_ascii=False))
            except ValueError:
                pass
        return self.text(text)

    def _answer(self, line: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = read_stream(line["answer"]) if line["streamed"] else read_answer(read_json(line["answer"]))
        except (ValueError, LookupError, TypeError, AttributeError):
            return {"answer": self.text(line["answer"])}
        if answer.message is None:
            return {"answer": self.text(line["answer"]) if line["status"] != 200 else "{}", "streamed": False}
        choices = [{"message": self.value(answer.message)}]
        told = {"id": answer.id, "choices": choices, "usage": answer.usage}
        return {"answer": write_json(told).decode(), "streamed": False}
