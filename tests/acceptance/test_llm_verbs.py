"""The language model as a user sees it: traced llm check, and what it has taken in traced status."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.llm.question import ChatMessage, Purpose, Question, Reply
from store.database import open_store, sqlite_url, write_session
from store.repositories.cycles import save_cycle
from tests.acceptance.conftest import Traced
from tests.integration.llm.llm_client import KEY
from tests.integration.llm.test_check import able
from tests.scripted_model import Scripted, ScriptedReply, Status, scripted_server
from tests.unit.store.chain import CYCLE, T0
from traced.llm.connection import StoreLedger


def at(server: Scripted, *extra: str) -> list[str]:
    settings = ["llm.model=scripted", f"llm.base_url={server.url}", *extra]
    return [word for setting in settings for word in ("--set", setting)]


def test_check_tells_what_it_finds_line_by_line_and_stores_nothing(traced: Traced, tmp_path: Path) -> None:
    with scripted_server(able, key=KEY) as server:
        (tmp_path / "key").write_text(KEY)
        result = traced("llm", "check", *at(server, "llm.api_key_file=key"))
        assert result.code == 0, result.err
        for line in (
            f"ok  server        {server.url} answers and lists 1 model",
            "ok  key           accepted, from key",
            "ok  context       32768 tokens, reported by the server",
            "ok  json_schema   works and is used",
            "ok  tool call     works",
            "scripted works with traced.",
        ):
            assert line in result.out
        json_result = traced("llm", "check", *at(server), "--json", env={"OPENAI_API_KEY": KEY})
        assert (json_result.code, json_result.json["ok"], json_result.json["way"]) == (0, True, "json_schema")
        assert json_result.json["seen"][1]["told"] == "accepted, from the variable OPENAI_API_KEY"
    assert KEY not in result.out + result.err + json_result.out + json_result.err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["key"]


@pytest.mark.parametrize("debug", ["", "1"])
def test_check_on_a_server_that_says_the_key_back(traced: Traced, debug: str) -> None:
    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        return Status(500, message=f"You sent Bearer {KEY}")

    env = {"OPENAI_API_KEY": KEY, "TRACED_DEBUG": debug, "OPENAI_LOG": "debug" if debug else ""}
    with scripted_server(script) as server:
        result = traced("llm", "check", *at(server), env=env)
    assert result.code == 1
    assert "status 500: You sent Bearer ***" in result.out
    assert KEY not in result.out + result.err


def test_what_the_surroundings_say_sends_nothing_elsewhere(traced: Traced) -> None:
    with scripted_server("{}") as elsewhere, scripted_server(able, key=KEY) as server:
        address = elsewhere.url.removesuffix("/v1")
        env = {
            "OPENAI_API_KEY": KEY,
            **dict.fromkeys(["LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"], "true"),
            **dict.fromkeys(["LANGSMITH_API_KEY", "LANGCHAIN_API_KEY"], "ls-1"),
            **dict.fromkeys(["LANGSMITH_ENDPOINT", "LANGCHAIN_ENDPOINT", "OPENAI_BASE_URL", "OPENAI_PROXY"], address),
            **dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY", "http_proxy"], address),
            "ALL_PROXY": "socks5://127.0.0.1:9",
            "SSL_CERT_FILE": "/nonexistent",
        }
        result = traced("llm", "check", *at(server), env=env)
        assert (result.code, result.err) == (0, ""), result.err
        assert (len(server.requests), elsewhere.connections) == (5, 0)


@pytest.mark.parametrize("variable", ["ALL_PROXY=socks5://127.0.0.1:9", "SSL_CERT_FILE=/nonexistent"])
def test_surroundings_that_allow_no_connection_are_named(traced: Traced, variable: str) -> None:
    name, _, value = variable.partition("=")
    options = ["--set", "llm.model=m", "--set", "llm.base_url=http://192.0.2.7/v1"]
    result = traced("llm", "check", *options, env={name: value})
    assert result.code == 1
    assert "the model m at http://192.0.2.7/v1 is not reachable from here" in result.err
    assert name in result.err.partition("Try:")[2]


@pytest.mark.parametrize(
    ("address", "pattern"),
    [("", r"looked up 'api\.openai\.com'"), ("http://192.0.2.7/v1", r"connected to \('192\.0\.2\.7', 80\)")],
)
def test_a_command_that_calls_another_address_fails_the_test(traced: Traced, address: str, pattern: str) -> None:
    options = ["--set", "llm.model=m", "--set", f"llm.base_url={address}"]
    with pytest.raises(AssertionError, match=pattern):
        traced("llm", "check", *options, env={"OPENAI_API_KEY": KEY})


def test_check_without_a_model_or_a_key_says_what_to_set(traced: Traced) -> None:
    result = traced("llm", "check", "--json")
    assert (result.code, result.json["error"]["type"]) == (1, "LlmError")
    assert "llm.model" in result.json["error"]["hint"]
    result = traced("llm", "check", "--set", "llm.model=m")
    assert "OPENAI_API_KEY is not set" in result.err
    assert "llm.base_url for your own server" in result.err


def test_status_tells_what_each_stage_of_a_cycle_took(traced: Traced, tmp_path: Path) -> None:
    store = open_store(sqlite_url(tmp_path / "traced-data" / "traced.db"))
    with write_session(store) as session:
        save_cycle(session, CYCLE)
    assert traced("status", "--json").json["costs"] == []
    ledger = StoreLedger(store, lambda: T0)
    reply = Reply("{}", "stop", 61_000, 500, 0.25, 12.0)
    for number, stage in enumerate(["analyze", "analyze", "synthesize"]):
        question = Question(Purpose("c1", stage), (ChatMessage("user", str(number)),))
        ledger.keep(question.key("m", None), question, "m", replace(reply, estimated=stage == "synthesize"))
    store.dispose()
    costs = {(row["cycle"], row["stage"]): row for row in traced("status", "--json").json["costs"]}
    assert list(costs) == [("c1", "analyze"), ("c1", "synthesize")]
    assert costs["c1", "analyze"] == {
        "cycle": "c1",
        "stage": "analyze",
        "calls": 2,
        "prompt_tokens": 122_000,
        "completion_tokens": 1_000,
        "cost": 0.5,
        "seconds": 24.0,
        "estimated": 0,
    }
    rows = [re.split(" {2,}", line.strip()) for line in traced("status").out.splitlines()]
    assert ["c1", "analyze", "2", "122,000 + 1,000", "0.5", "24"] in rows
    assert ["c1", "synthesize", "1", "~61,000 + ~500", "~0.25", "12"] in rows
