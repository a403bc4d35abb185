"""Check for ``traced llm check`` whether the configured language model works, in which output modes, and how fast.

Findings are yielded in order, and the first failure of connection, key or model ends the check. Nothing is stored, and
failures are not retried.
"""

import difflib
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agents.errors import ModelError, ModelUnavailable
from agents.llm.model import LENGTH, Endpoint
from agents.llm.question import ChatMessage, Purpose, Question
from agents.llm.server import ModelListUnavailable, Transient, UnsupportedRequest, context_lengths
from agents.llm.structured_output import OUTPUT_MODES, Unreadable, parse_object
from agents.llm.transport import Transport
from traced.config.cycle_sections import LlmSection
from traced.llm.connection import LLM, api_key, endpoint, key_from

NEAR = 5  # similar model names shown if the configured one is not listed
WORDS = 200  # maximum tokens of the timed answer
SHORT_ANSWER_TOKENS = 16
CONTEXT = 6000  # tokens that an analyst needs: rejected answers with objections, one conversation, our instructions
GREETING = "Say hello in one word."
TIMED = "Write the numbers from 1 to 60 in English words, separated by commas, and nothing else."
NOT_THERE = "{table}.base_url: check that the server is running"
WRONG_PROTOCOL = "{table}.base_url: check that it is an OpenAI-compatible endpoint (usually it ends in /v1)"
BUSY = "the server is busy: retry later, or use another account"
FAILING = "the server fails: see its log"
FORM_PROMPT = "A customer asked for a blue cup and was sent a red one. Is that what was asked for?"


class Verdict(BaseModel):
    """The form that the check asks for."""

    model_config = ConfigDict(extra="forbid")
    verdict: Literal["yes", "no"]
    reason: str


@dataclass(frozen=True)
class CheckFinding:
    """One finding; ``passed`` is None for information."""

    name: str
    passed: bool | None
    told: str
    hint: str = ""


@dataclass
class CheckReport:
    """The findings of a check; figures are None if it ended before measuring them, ``way`` also for a user."""

    base_url: str
    model: str
    needs_form: bool = True
    seen: list[CheckFinding] = field(default_factory=list)
    way: str | None = None
    context_tokens: int | None = None
    first_token_s: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    estimated: bool | None = None

    @property
    def ok(self) -> bool:
        """Return whether the model can be used."""
        has_form = self.way is not None or not self.needs_form
        return has_form and all(finding.passed is not False for finding in self.seen)


async def check(section: LlmSection, on_finding: Callable[[CheckFinding], None], table: str = LLM) -> CheckReport:
    """Check the model of a section of the settings; ``on_finding`` is called with each finding.

    A user needs no answers in a form and a shorter context than an analyst.

    Args:
        table: Name of the section.

    Raises:
        LlmError: The section is incomplete.
    """
    model_endpoint = replace(endpoint(section, table), patience_s=0.0)
    report = CheckReport(model_endpoint.base_url, model_endpoint.model, table == LLM)
    async for finding in _findings(report, model_endpoint, section):
        report.seen.append(finding)
        on_finding(finding)
    return report


async def _findings(report: CheckReport, model_endpoint: Endpoint, section: LlmSection) -> AsyncIterator[CheckFinding]:
    models: dict[str, int] = {}
    table = model_endpoint.section
    try:
        models = await context_lengths(model_endpoint)
        yield CheckFinding("server", True, f"{model_endpoint.base_url} answers and lists {_count(len(models))}")
    except ModelListUnavailable as error:
        text = f"{model_endpoint.base_url} lists no models: {getattr(error.failure, 'message', error)}"
        if isinstance(error.failure, Transient):
            yield CheckFinding("server", False, text, _advice(text, table))
            return
        yield CheckFinding("server", None, text)
    if models and model_endpoint.model not in models:
        near = difflib.get_close_matches(model_endpoint.model, models, NEAR, 0.0)
        yield CheckFinding(
            "model",
            None,
            f"{model_endpoint.model} is not among them; similar names: {', '.join(near)}",
            f"{table}.model",
        )
    line = Transport(model_endpoint)
    async with line.open():
        try:
            await line.send_in_mode(0, _question(GREETING, SHORT_ANSWER_TOKENS), None)
        except UnsupportedRequest as error:
            yield CheckFinding("answer", False, str(error), f"{table}.model, {table}.base_url")
            return
        except ModelError as error:
            name = "key" if "api_key" in error.hint else "answer"
            hint = _advice(error.message, table) if isinstance(error, ModelUnavailable) else error.hint
            yield CheckFinding(name, False, error.message, hint)
            return
        yield CheckFinding("key", True, f"accepted, {key_from(section)}" if api_key(section, table) else "not needed")
        yield _context(report, section, models.get(model_endpoint.model, 0), table)
        for way in range(len(OUTPUT_MODES)) if table == LLM else ():
            yield await _way(report, line, way)
        yield await _speed(report, line)
    if report.way is None and table == LLM:
        yield CheckFinding(
            "form", False, "no output mode gives a well-formed answer", "set llm.model to a more capable model"
        )


def _count(models: int) -> str:
    return "1 model" if models == 1 else f"{models} models"


def _advice(failure: str, table: str) -> str:
    """Return the setting to look at after a failed request."""
    if seconds := re.search(r"\(([\w.]+\.\w+_s)\)$", failure):
        return f"raise {seconds[1]} if the server needs longer; {NOT_THERE.format(table=table)}"
    if status := re.search(r"\bstatus (\d)(\d\d): ", failure):
        return BUSY if status[1] == "4" else FAILING
    is_wrong = "OpenAI's protocol" in failure or "without a finish reason" in failure
    return (WRONG_PROTOCOL if is_wrong else NOT_THERE).format(table=table)


async def _speed(report: CheckReport, line: Transport) -> CheckFinding:
    try:
        reply, response = await line.send_in_mode(0, _question(TIMED), None)
    except (UnsupportedRequest, ModelError) as error:
        return CheckFinding("speed", None, f"unknown: {error}")
    report.first_token_s, report.seconds, report.estimated = response.first_s, reply.seconds, reply.estimated
    writing = reply.seconds - response.first_s
    report.tokens_per_second = reply.completion_tokens / writing if writing > 0.01 else None
    qualifier = "about " if reply.estimated else ""
    speed = f", {qualifier}{report.tokens_per_second:.0f} tokens/s" if report.tokens_per_second else ""
    tokens = f"{qualifier}{reply.prompt_tokens} + {reply.completion_tokens} tokens"
    text = f"in {reply.seconds:.1f} s, first data after {response.first_s:.1f} s{speed} ({tokens})"
    return CheckFinding(
        "speed", True, f"{text}; the server reports no token counts, costs are estimates" if reply.estimated else text
    )


def _context(report: CheckReport, section: LlmSection, server_tokens: int, table: str) -> CheckFinding:
    report.context_tokens = section.context_tokens or server_tokens or None
    if 0 < server_tokens < section.context_tokens:
        text = f"{table}.context_tokens is {section.context_tokens}, the server reports {server_tokens}"
        return CheckFinding("context", False, text, f"{table}.context_tokens = {server_tokens}, or 0")
    if not report.context_tokens:
        return CheckFinding("context", None, f"unknown; set {table}.context_tokens")
    origin = f"set by {table}.context_tokens" if section.context_tokens else "reported by the server"
    text = f"{report.context_tokens} tokens, {origin}"
    if table == LLM and report.context_tokens < CONTEXT:
        return CheckFinding(
            "context", False, f"{text}; an analyst needs {CONTEXT}", "set llm.model to a model with a longer context"
        )
    return CheckFinding("context", True, text)


async def _way(report: CheckReport, line: Transport, way: int) -> CheckFinding:
    name = OUTPUT_MODES[way]
    try:
        reply, _ = await line.send_in_mode(way, _question(FORM_PROMPT), Verdict.model_json_schema())
        if reply.finish_reason == LENGTH:
            return CheckFinding(name, None, f"malformed: cut off after {reply.completion_tokens} tokens")
        Verdict.model_validate(parse_object(reply.text))
    except (UnsupportedRequest, ModelError) as error:
        return CheckFinding(name, None, f"refused: {error.message if isinstance(error, ModelError) else error}")
    except Unreadable as error:
        return CheckFinding(name, None, f"malformed: {error}")
    except ValidationError as error:
        first = error.errors()[0]
        return CheckFinding(name, None, f"malformed: {'.'.join(map(str, first['loc']))}: {first['msg']}")
    if report.way is not None:
        return CheckFinding(name, True, "works")
    report.way = name
    return CheckFinding(name, True, "works and is used")


def _question(text: str, max_tokens: int = WORDS) -> Question:
    return Question(Purpose("", "check"), (ChatMessage("user", text),), max_tokens=max_tokens)
