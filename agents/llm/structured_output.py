"""How an endpoint is asked for an answer in a form: by a JSON schema, by a tool to call, or in words.

Invariants: what an endpoint takes is found out once in a process and remembered (``habits``): a way that it refuses, or
by which it has never yet answered in form, gives way to the next; one that has worked stays. Parameters that an
endpoint does not know are left out from then on. Sources: OpenAI's API reference for chat completions
(``response_format``, ``tools``, ``max_completion_tokens``), which vLLM, llama.cpp and others follow in part.

The JSON object in a model's answer: prose around it, code fences, thoughts before it, commas too many.

Invariants: nothing is guessed. An object is taken where the answer holds exactly one, as it stands or without trailing
commas; two keys of the same name, NaN and infinities are no JSON. How it fails: ``Unreadable`` says why, in words for
the model. Not covered: single quotes, comments, objects that are cut off: those go back.
"""

import functools
import json
import re
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Any

from agents.llm.question import Question, Said

Schema = dict[str, Any]

WAYS = ("json_schema", "tool call", "JSON in text")
IN_WORDS = len(WAYS) - 1
KEPT = -1  # no way: the reply was there already
DISPENSABLE = ("stream_options", "temperature", "max_completion_tokens")  # left out, or called otherwise
NOT_THIS_WAY = (400, 415, 422, 501)  # statuses of a request that the server does not understand
TOO_LONG = re.compile(
    r"context.{0,20}(length|window|size|limit)|maximum.{0,20}context|max_model_len|too many tokens|prompt is too long"
    r"|context_length_exceeded|string_above_max_length",
    re.IGNORECASE,
)


@dataclass
class Habits:
    """What is known of an endpoint: the first way that it is not known to refuse, and what it cannot be sent."""

    way: int = 0
    proven: bool = False
    without: set[str] = field(default_factory=set)

    def worked(self, way: int) -> None:
        """An answer in form came this way."""
        if not self.proven and way != KEPT:
            self.way, self.proven = way, True

    def ignored(self, way: int) -> None:
        """An answer out of form came this way: before it has ever worked, the next is tried."""
        if not self.proven and way == self.way:
            self.way = min(way + 1, IN_WORDS)


@functools.cache
def habits(base_url: str, model: str) -> Habits:
    """What this process knows of an endpoint."""
    return Habits()


def dispensable(param: str, complaint: str, without: Set[str]) -> str:
    """The parameter that a server complains of and that it can do without; "" where it is none of these.

    ``param`` is the one that it names as such, "" where it names none and only the text may tell.
    """
    left = [name for name in DISPENSABLE if name not in without]
    return next((name for name in left if (name == param if param else name in complaint)), "")


def request(question: Question, form: Schema | None, way: int, without: Set[str]) -> dict[str, Any]:
    """What a request says beside the dialogue."""
    limit = "max_tokens" if "max_completion_tokens" in without else "max_completion_tokens"
    asked: dict[str, Any] = {limit: question.max_tokens}
    if "stream_options" not in without:
        asked["stream_options"] = {"include_usage": True}
    if "temperature" not in without:
        asked["temperature"] = question.temperature
    if form is not None and WAYS[way] == "json_schema":
        named = {"name": _name(form), "schema": form, "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": named}
    elif form is not None and WAYS[way] == "tool call":
        function = {"name": _name(form), "description": "Give your answer.", "parameters": form}
        asked["tools"] = [{"type": "function", "function": function}]
        asked["tool_choice"] = {"type": "function", "function": {"name": _name(form)}}
    return asked


def dialogue(said: tuple[Said, ...], form: Schema | None, way: int) -> tuple[Said, ...]:
    """What is said; where the form is asked for in words, these end it."""
    if form is None or way != IN_WORDS:
        return said
    words = f"Answer with one JSON object and no other words. It fits this JSON Schema:\n{json.dumps(form)}"
    return (*said[:-1], replace(said[-1], text=f"{said[-1].text}\n\n{words}"))


def _name(form: Schema) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", str(form.get("title", "answer")))[:64] or "answer"


THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
OPENING = re.compile(r'\{\s*["}]')  # of an object, not of a set in prose
STRING_OR_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
LONGEST = 4_000_000  # characters


class Unreadable(ValueError):
    """There is not exactly one JSON object in the answer."""


def object_in(answer: str) -> dict[str, Any]:
    """The one JSON object of an answer."""
    if len(answer) > LONGEST:
        raise Unreadable(f"the answer has {len(answer)} characters, which is too long")
    told = THOUGHTS.sub("", answer, count=1).strip()
    opening = OPENING.search(told)
    if opening is None or told.startswith("["):
        raise Unreadable("there is no JSON object in the answer")
    told = told[opening.start() :]
    try:
        found = _objects(told)
    except Unreadable:
        found = _objects(STRING_OR_COMMA.sub(lambda matched: matched.group(1) or "", told))
    if len(found) > 1:
        raise Unreadable(f"there are {len(found)} JSON objects in the answer; give one")
    return found[0]


def _objects(text: str) -> list[dict[str, Any]]:
    """The objects of a text that begins with one; what is inside of one that cannot be read is not looked for."""
    found = []
    opening = OPENING.search(text)
    while opening is not None:
        try:
            value, end = DECODER.raw_decode(text, opening.start())
        except RecursionError:
            raise Unreadable("the JSON is nested too deeply") from None
        except ValueError as error:
            raise Unreadable(f"the JSON cannot be read: {error}") from None
        found.append(value)
        opening = OPENING.search(text, end)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} is there twice")
        made[key] = value
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant)
