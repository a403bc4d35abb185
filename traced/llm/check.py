"""``traced llm check``: whether the language model of the settings can be asked, how, and how fast it is.

Invariants: each finding says what was seen, and one that failed names the setting to look at; nothing is stored, and
a failure is asked about once, not for as long as there is patience. What comes later depends on what came before, so
the first failure of the connection, the key or the model ends the check.
How it fails: ``LlmError`` where there is nothing to try. Not covered: how good the answers are.
"""

import difflib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agents.errors import ModelError, ModelUnavailable
from agents.llm.model import LENGTH, Endpoint
from agents.llm.question import Purpose, Question, Said
from agents.llm.server import Misunderstood, Transient, Unlisted, listed
from agents.llm.structured_output import WAYS, Unreadable, object_in
from agents.llm.transport import Line
from traced.config.cycle_sections import LlmSection
from traced.llm.connection import api_key, endpoint, key_from

NEAR = 5  # names shown of the models that are there
WORDS = 200  # tokens at most of the answer that is timed
SHORT = 16
CONTEXT = 6000  # tokens: what goes back with complaints, one conversation, and the words of ours about it
GREETING = "Say hello in one word."
TIMED = "Write the numbers from 1 to 60 in English words, separated by commas, and nothing else."
NOT_THERE = "llm.base_url: is the server there?"
NOT_ONE = "llm.base_url: is it a server of OpenAI's protocol? (it ends in /v1 as a rule)"
BUSY = "later, or with another account: it is there, and busy"
FAILING = "the server's own log: it is there, and fails"
MADE_UP = "A customer asked for a blue cup and was sent a red one. Is that what was asked for?"


class Verdict(BaseModel):
    """What a form is tried with."""

    model_config = ConfigDict(extra="forbid")
    verdict: Literal["yes", "no"]
    reason: str


@dataclass(frozen=True)
class Seen:
    """One finding; ``passed`` is None for what is only told."""

    name: str
    passed: bool | None
    told: str
    hint: str = ""


@dataclass
class Found:
    """What a check found; figures are None where it did not come so far."""

    base_url: str
    model: str
    seen: list[Seen] = field(default_factory=list)
    way: str | None = None
    context_tokens: int | None = None
    first_token_s: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    estimated: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether it can be worked with."""
        return self.way is not None and all(one.passed is not False for one in self.seen)


async def check(section: LlmSection, then: Callable[[Seen], None]) -> Found:
    """Try the model of the settings; ``then`` is told of each finding as it is made. Raises ``LlmError``."""
    described = replace(endpoint(section), patience_s=0.0)
    found = Found(described.base_url, described.model)
    async for one in _findings(found, described, section):
        found.seen.append(one)
        then(one)
    return found


async def _findings(found: Found, described: Endpoint, section: LlmSection) -> AsyncIterator[Seen]:
    models: dict[str, int] = {}
    try:
        models = await listed(described)
        yield Seen("server", True, f"{described.base_url} is there and lists models: {len(models)}")
    except Unlisted as error:
        told = f"{described.base_url} lists no models: {getattr(error.failure, 'message', error)}"
        if isinstance(error.failure, Transient):
            yield Seen("server", False, told, _advice(told))
            return
        yield Seen("server", None, told)
    if models and described.model not in models:
        near = difflib.get_close_matches(described.model, models, NEAR, 0.0)
        yield Seen("model", None, f"{described.model} is not among them; there are {', '.join(near)}", "llm.model")
    line = Line(described)
    async with line.open():
        try:
            await line.send_by(0, _question(GREETING, SHORT), None)
        except Misunderstood as error:
            yield Seen("answer", False, str(error), "llm.model, llm.base_url")
            return
        except ModelError as error:
            name = "key" if "api_key" in error.hint else "answer"
            hint = _advice(error.message) if isinstance(error, ModelUnavailable) else error.hint
            yield Seen(name, False, error.message, hint)
            return
        yield Seen("key", True, f"accepted, {key_from(section)}" if api_key(section) else "none is needed")
        yield _context(found, section, models.get(described.model, 0))
        for way in range(len(WAYS)):
            yield await _way(found, line, way)
        yield await _speed(found, line)
    if found.way is None:
        yield Seen("form", False, "it gives no answer in form in any of these ways", "llm.model: a more able one")


def _advice(failure: str) -> str:
    """What to look at when no answer came."""
    if seconds := re.search(r"\((llm\.\w+_s)\)$", failure):
        return f"{seconds[1]}, if it needs longer; {NOT_THERE}"
    if status := re.search(r"\bstatus (\d)(\d\d): ", failure):
        return BUSY if status[1] == "4" else FAILING
    return NOT_ONE if "OpenAI's protocol" in failure or "held no choice" in failure else NOT_THERE


async def _speed(found: Found, line: Line) -> Seen:
    try:
        reply, heard = await line.send_by(0, _question(TIMED), None)
    except (Misunderstood, ModelError) as error:
        return Seen("speed", None, f"not known: {error}")
    found.first_token_s, found.seconds, found.estimated = heard.first_s, reply.seconds, reply.estimated
    writing = reply.seconds - heard.first_s
    found.tokens_per_second = reply.completion_tokens / writing if writing > 0.01 else None
    about = "about " if reply.estimated else ""
    speed = f", {about}{found.tokens_per_second:.0f} tokens/s" if found.tokens_per_second else ""
    tokens = f"{about}{reply.prompt_tokens} + {reply.completion_tokens} tokens"
    told = f"in {reply.seconds:.1f} s, the first piece after {heard.first_s:.1f} s{speed} ({tokens})"
    return Seen("speed", True, f"{told}; it tells no token counts, costs are estimates" if reply.estimated else told)


def _context(found: Found, section: LlmSection, told: int) -> Seen:
    found.context_tokens = section.context_tokens or told or None
    if 0 < told < section.context_tokens:
        said = f"llm.context_tokens is {section.context_tokens}, the server says {told}"
        return Seen("context", False, said, f"llm.context_tokens = {told}, or 0")
    if not found.context_tokens:
        return Seen("context", None, "not told; llm.context_tokens may say it")
    says = f"{found.context_tokens} tokens{' by llm.context_tokens' if section.context_tokens else ', the server says'}"
    if found.context_tokens < CONTEXT:
        return Seen("context", False, f"{says}; an analyst needs {CONTEXT}", "llm.model: one with a longer context")
    return Seen("context", True, says)


async def _way(found: Found, line: Line, way: int) -> Seen:
    name = WAYS[way]
    try:
        reply, _ = await line.send_by(way, _question(MADE_UP), Verdict.model_json_schema())
        if reply.finish_reason == LENGTH:
            return Seen(name, None, f"not in form: cut off after {reply.completion_tokens} tokens")
        Verdict.model_validate(object_in(reply.text))
    except (Misunderstood, ModelError) as error:
        return Seen(name, None, f"refused: {error.message if isinstance(error, ModelError) else error}")
    except Unreadable as error:
        return Seen(name, None, f"not in form: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        return Seen(name, None, f"not in form: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    if found.way is not None:
        return Seen(name, True, "works too")
    found.way = name
    return Seen(name, True, "works, and is what is used")


def _question(text: str, most: int = WORDS) -> Question:
    return Question(Purpose("", "check"), (Said("user", text),), max_tokens=most)
