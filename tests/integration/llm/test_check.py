"""``traced llm check`` on servers of every kind: what it finds, what it says, what it hints at."""

import re
import socket
from typing import Any

import pytest

from agents.llm.structured_output import OUTPUT_MODES
from tests.integration.llm.llm_client import KEY
from tests.integration.llm.test_structured_output import NO_SCHEMA, way
from tests.scripted_model import (
    Dropped,
    Message,
    NoChoices,
    NotJson,
    Prose,
    RecordedResponse,
    Refusal,
    Scripted,
    ScriptedReply,
    Silence,
    Status,
    Text,
    Tool,
    Truncated,
    scripted_server,
)
from traced.config.cycle_sections import LlmSection
from traced.llm.check import CheckFinding, CheckReport, check

GOOD = {"verdict": "no", "reason": "it is red"}
PAGE = "<!DOCTYPE html><html><head><title>Hello</title></head><body><p>there</p></body></html>"
NUMBERS = ", ".join(["one"] * 60)


def able(body: dict[str, Any], nth: int) -> ScriptedReply:
    """A server that takes everything."""
    if "tools" in body:
        return Tool(GOOD)
    return GOOD if way(body) != "none" else Text(NUMBERS, (40, 120))


async def run_check(server: Scripted, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> CheckReport:
    monkeypatch.setenv("ADA_KEY", KEY)
    section = LlmSection(**{"model": "scripted", "base_url": server.url, "api_key_env": "ADA_KEY", **settings})
    expected_text: list[CheckFinding] = []
    report = await check(section, expected_text.append)
    assert expected_text == report.seen
    assert KEY not in repr(report)
    return report


def findings_of(report: CheckReport) -> dict[str, bool | None]:
    return {item.name: item.passed for item in report.seen}


async def test_a_server_that_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(able, key=KEY) as server:
        report = await run_check(server, monkeypatch)
        assert len(server.requests) == 5  # a greeting, three ways, one that is timed
    passed = ["server", "key", "context", *OUTPUT_MODES, "speed"]
    assert (report.ok, findings_of(report)) == (True, dict.fromkeys(passed, True))
    assert (report.way, report.context_tokens, report.estimated) == ("json_schema", 32768, False)
    assert report.seconds is not None
    assert "(40 + 120 tokens)" in report.seen[-1].told


@pytest.mark.parametrize(
    ("answer", "expected_text"),
    [
        (Status(400, message=NO_SCHEMA), "refused: .*is not supported"),
        ("I would say no.", "malformed: there is no JSON object"),
        ({"verdict": "perhaps", "reason": ""}, "malformed: verdict: Input should be 'yes' or 'no'"),
        (Truncated('{"verdict": "no", '), "malformed: cut off after 3 tokens"),
        (Refusal(), "malformed: there is no JSON object"),
        (Dropped(), "refused: .*finish reason|refused: .*connection"),
        (NotJson(), "refused: .*response is not in OpenAI's protocol"),
    ],
)
async def test_an_output_mode_that_fails_is_reported_and_the_next_one_is_used(
    monkeypatch: pytest.MonkeyPatch, answer: ScriptedReply, expected_text: str
) -> None:
    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return answer if way(body) == "json_schema" else able(body, nth)

    with scripted_server(script) as server:
        report = await run_check(server, monkeypatch)
    assert (report.ok, report.way) == (True, "tool call")
    [schema] = [item for item in report.seen if item.name == "json_schema"]
    assert schema.passed is None
    assert re.search(expected_text, schema.told)


async def test_a_model_that_gives_no_answer_in_form_cannot_be_worked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server("Ho hum.") as server:
        report = await run_check(server, monkeypatch)
    assert (report.ok, report.way) == (False, None)
    assert "a more capable model" in report.seen[-1].hint


async def test_prose_around_the_json_is_in_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return Prose(GOOD) if way(body) == "words" else "Ho hum."

    with scripted_server(script) as server:
        assert (await run_check(server, monkeypatch)).way == "JSON in text"


@pytest.mark.parametrize(
    ("answer", "name", "expected_text", "hint"),
    [
        (Status(401, message="Incorrect API key provided"), "key", "status 401", "llm.api_key_env"),
        (Status(404, message="no model scripted"), "answer", "status 404", "llm.model"),
        (Status(400, message="bad"), "answer", "status 400: bad", "llm.base_url"),
        (Status(429, retry_after=9), "answer", "status 429", "the server is busy"),
        (Status(503, message="asleep"), "answer", "status 503: asleep", "see its log"),
        (Status(307, message="over there"), "answer", "status 307: over there", "redirects to"),
        (Dropped(midway=False), "answer", "connection failed", "check that the server is running"),
        (NoChoices(), "answer", "without a finish reason", "check that it is an OpenAI-compatible endpoint"),
        (Silence(60), "answer", "no data for 1 s", "raise llm.silence_s if the server needs longer"),
        (
            RecordedResponse(PAGE.encode(), 404, "text/html"),
            "answer",
            "status 404: an HTML page: Hello there",
            "llm.base_url",
        ),
        (
            RecordedResponse(PAGE.encode(), 200, "text/html"),
            "answer",
            "OpenAI's protocol",
            "check that it is an OpenAI-compatible endpoint",
        ),
    ],
)
async def test_the_first_failure_of_the_connection_ends_it_without_patience(
    monkeypatch: pytest.MonkeyPatch, answer: ScriptedReply, name: str, expected_text: str, hint: str
) -> None:
    with scripted_server(answer) as server:
        # On a busy machine an answer takes more than a second.
        report = await run_check(server, monkeypatch, silence_s=1 if isinstance(answer, Silence) else 60)
        assert len(server.requests) == 1
    last = report.seen[-1]
    assert (report.ok, last.name, last.passed) == (False, name, False)
    assert expected_text in last.told
    assert hint in last.hint


async def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as bound:  # taken, and nobody listens
        bound.bind(("127.0.0.1", 0))
        with scripted_server(able) as server:
            nobody = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
            report = await run_check(server, monkeypatch, base_url=nobody)
        assert server.requests == []
    assert (report.ok, findings_of(report)) == (False, {"server": False})
    assert "llm.base_url: check that the server is running" in report.seen[0].hint


@pytest.mark.parametrize("listing", ["a page", None, [], ["a"], {"data": None}, {"data": ["a"]}, {"models": []}])
async def test_an_invalid_model_list_is_reported_and_the_model_is_tried(
    monkeypatch: pytest.MonkeyPatch, listing: Any
) -> None:
    with scripted_server(able) as server:
        server.listing = listing
        report = await run_check(server, monkeypatch)
    assert (report.ok, report.seen[0].passed) == (True, None)
    assert report.seen[0].told.endswith("lists no models: the response is not a model list of OpenAI's protocol")


async def test_an_unlisted_model_is_reported_with_the_listed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(
        Status(404, message="no such model"), models=[{"id": "scripted-2"}, {"id": "other"}]
    ) as server:
        report = await run_check(server, monkeypatch)
    [model] = [item for item in report.seen if item.name == "model"]
    assert model.told == "scripted is not among them; similar names: scripted-2, other"
    assert not report.ok


async def test_a_model_list_is_shown_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server(able, models=[{"id": f"scripted-{KEY}"}]) as server:
        report = await run_check(server, monkeypatch)  # which looks for it
    assert "similar names: scripted-***" in report.seen[1].told


@pytest.mark.parametrize(
    ("listing", "set_to", "passed", "expected_text"),
    [
        ({"max_model_len": 8192}, 0, True, "8192 tokens, reported by the server"),
        ({"meta": {"n_ctx_train": 32768}}, 0, True, "32768 tokens, reported by the server"),
        ({"max_model_len": 4096}, 0, False, "4096 tokens, reported by the server; an analyst needs 6000"),
        ({}, 4096, False, "4096 tokens, set by llm.context_tokens; an analyst needs 6000"),
        ({}, 0, None, "unknown"),
        ({}, 8000, True, "8000 tokens, set by llm.context_tokens"),
        ({"context_length": 4096}, 8000, False, "llm.context_tokens is 8000, the server reports 4096"),
        ({"max_model_len": "long"}, 0, None, "unknown"),
    ],
)
async def test_the_context_comes_from_the_settings_or_the_server(
    monkeypatch: pytest.MonkeyPatch, listing: dict[str, Any], set_to: int, passed: bool | None, expected_text: str
) -> None:
    with scripted_server(able, models=[{"id": "scripted", **listing}]) as server:
        report = await run_check(server, monkeypatch, context_tokens=set_to)
    [context] = [item for item in report.seen if item.name == "context"]
    assert context.passed is passed
    assert expected_text in context.told
    assert report.ok is (passed is not False)


async def test_missing_token_counts_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return able(body, nth) if way(body) != "none" else Message(NUMBERS, usage=None)

    with scripted_server(script) as server:
        report = await run_check(server, monkeypatch)
    assert report.estimated
    assert "costs are estimates" in report.seen[-1].told
