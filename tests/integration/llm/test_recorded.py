"""What a real server once answered, replayed: each form of asking is understood as it was then."""

from typing import Any

import pytest

from agents.errors import ModelRefused
from agents.llm.question import Reply
from agents.llm.structured_output import Unreadable, parse_object
from tests.integration.llm.llm_client import Fault
from tests.integration.llm.recording import CASES, FILES, read_recording, send
from tests.scripted_model import RecordedResponse, ScriptedReply, scripted_server

MODEL = "SmolLM2-135M-Instruct"


async def replayed(name: str) -> Reply:
    recording = read_recording(name)

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        assert body == recording["request"], "it is asked otherwise now: record again"
        return RecordedResponse(recording["body"].encode(), recording["status"], recording["type"])

    with scripted_server(script) as server:
        return (await send(server.url, MODEL, CASES[name]))[0]


def test_every_recording_is_of_a_case_and_holds_no_key() -> None:
    assert sorted(file.stem for file in FILES.glob("*.json")) == sorted(CASES)
    for name in CASES:
        recording = read_recording(name)
        assert sorted(recording) == ["body", "request", "server", "status", "type"]
        assert "vLLM" in recording["server"]
        assert "Bearer" not in str(recording)


async def test_an_answer_by_schema_is_in_form_and_counted() -> None:
    reply = await replayed("json_schema")
    assert Fault.model_validate(parse_object(reply.text)) == Fault(fault="simulator", message=1)
    assert (reply.finish_reason, reply.prompt_tokens, reply.completion_tokens) == ("stop", 67, 20)
    assert not reply.estimated


@pytest.mark.parametrize(
    ("name", "begins", "tokens"),
    [
        ("tool_call", "[1, 2, 3", 60),  # what it called the tool with
        ("json_in_text", "The JSON Schema for this example is", 60),
        ("cut_off", '{\n  "f', 4),
    ],
)
async def test_prose_of_a_weak_model_is_no_answer(name: str, begins: str, tokens: int) -> None:
    reply = await replayed(name)
    assert reply.text.startswith(begins)
    assert (reply.finish_reason, reply.completion_tokens) == ("length", tokens)
    with pytest.raises(Unreadable):
        parse_object(reply.text)


async def test_words_come_whole() -> None:
    reply = await replayed("text")
    assert reply.text.startswith("A cup is a small, often ornate object that holds a beverage")
    assert (reply.finish_reason, reply.completion_tokens) == ("length", 40)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("too_long", r"status 400: This model's maximum context length is 4096 tokens.*llm\.context_tokens"),
        ("no_such_model", r"status 404: The model `no-such-model` does not exist.*llm\.model"),
        ("wrong_key", r"status 401: Unauthorized.*llm\.api_key_env or llm\.api_key_file"),
    ],
)
async def test_refusals_quote_the_server_and_name_the_setting(name: str, sentence: str) -> None:
    with pytest.raises(ModelRefused, match=sentence):
        await replayed(name)
