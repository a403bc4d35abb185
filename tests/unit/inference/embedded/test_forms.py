"""The responses form, Anthropic's form and answers of a fixed form on the embedded engine, with the real clients."""

import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from tests.unit.inference.embedded.test_server import USER, serving
from traced.inference.client import EngineClient
from traced.inference.embedded import anthropic as embedded_anthropic
from traced.inference.embedded import responses, structure
from traced.inference.embedded.engine import Engine
from traced.inference.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
    "required": ["ok", "kind"],
}
TOOLS = [
    {"name": "get_order", "description": "Find an order.", "parameters": SCHEMA},
    {"name": "cancel", "description": "Cancel it.", "parameters": {"$ref": "#/$defs/P", "$defs": {"P": SCHEMA}}},
]
CHAT_TOOLS: list[Any] = [{"type": "function", "function": tool} for tool in TOOLS]
RESPONSE_TOOLS: list[Any] = [{"type": "function", "strict": False, **tool} for tool in TOOLS]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]} for tool in TOOLS
]
QUESTION = str(USER[0]["content"])
Check = Callable[[httpx.AsyncClient, EngineClient, Engine], Coroutine[Any, Any, None]]


def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0)


def anthropic_client(http: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=str(http.base_url), api_key="none", max_retries=0)


def is_valid(arguments: Any) -> bool:
    return arguments.keys() == {"ok", "kind"} and arguments["ok"] in (True, False) and arguments["kind"] in ("a", "b")


async def test_a_response_is_the_chat_answer_whole_and_streamed() -> None:
    async with serving() as (http, _, _), openai_client(http) as client:
        chat: Any = [{"role": "system", "content": "Be brief."}, *USER]
        options: Any = {"temperature": 0, "model": "base"}
        expected = await client.chat.completions.create(messages=chat, max_tokens=6, **options)
        options |= {"instructions": "Be brief.", "input": QUESTION, "max_output_tokens": 6}
        response = await client.responses.create(**options)
        assert response.output_text == expected.choices[0].message.content
        assert response.usage is not None
        assert expected.usage is not None
        assert response.usage.input_tokens == expected.usage.prompt_tokens
        assert (response.status, response.instructions) == ("incomplete", "Be brief.")
        async with client.responses.stream(**options) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert streamed.output_text == response.output_text
        assert [event.type.removeprefix("response.") for event in events] == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]


async def test_an_anthropic_message_is_the_chat_answer_whole_and_streamed() -> None:
    async with serving() as (http, _, _), openai_client(http) as chat_client, anthropic_client(http) as client:
        chat: Any = [{"role": "system", "content": "Be brief."}, *USER]
        # The client knows no temperature any more.
        options: Any = {"model": "base", "max_tokens": 6, "extra_body": {"temperature": 0}}
        expected = await chat_client.chat.completions.create(messages=chat, **options)
        options |= {"system": "Be brief.", "messages": USER}
        message = await client.messages.create(**options)
        (block,) = message.content
        assert block.type == "text"
        assert block.text == expected.choices[0].message.content
        assert expected.usage is not None
        assert message.usage.input_tokens == expected.usage.prompt_tokens
        assert message.stop_reason == "max_tokens"
        assert (message.id[:4], expected.id[:9]) == ("msg_", "chatcmpl-")
        async with client.messages.stream(**options) as stream:
            (streamed_block,) = (await stream.get_final_message()).content
        assert streamed_block.type == "text"
        assert streamed_block.text == block.text
        stopped = await client.messages.create(**options, stop_sequences=["nowhere", block.text[2:4]])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", block.text[2:4])
        count = await client.messages.count_tokens(model="base", system="Be brief.", messages=options["messages"])
        assert count.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize("choice", ["required", "cancel"])
async def test_a_forced_call_has_valid_arguments_in_every_form(choice: str) -> None:
    names = {"cancel"} if choice == "cancel" else {"get_order", "cancel"}
    async with serving() as (http, _, _), openai_client(http) as client, anthropic_client(http) as other:
        function_choice: Any = {"type": "function", "function": {"name": choice}}
        chat: Any = {"model": "base", "messages": USER, "tools": CHAT_TOOLS, "max_tokens": 200, "seed": 3}
        chat["tool_choice"] = choice if choice == "required" else function_choice
        complete = (await client.chat.completions.create(**chat)).choices[0]
        async with client.chat.completions.stream(**chat) as stream:
            streamed = (await stream.get_final_completion()).choices[0]
        for completed in (complete, streamed):
            assert completed.finish_reason == "tool_calls"
            assert completed.message.tool_calls
            (call,) = completed.message.tool_calls
            assert call.type == "function"
            assert call.function.name in names
            assert is_valid(json.loads(call.function.arguments))
        responses: Any = {"model": "base", "input": QUESTION, "tools": RESPONSE_TOOLS, "max_output_tokens": 200}
        responses["tool_choice"] = choice if choice == "required" else {"type": "function", "name": choice}
        async with client.responses.stream(**responses, extra_body={"seed": 3}) as response_stream:
            (item,) = (await response_stream.get_final_response()).output
        assert item.type == "function_call"
        assert item.name in names
        assert is_valid(json.loads(item.arguments))
        messages: Any = {"model": "base", "messages": USER, "tools": ANTHROPIC_TOOLS, "max_tokens": 200}
        messages["tool_choice"] = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
        async with other.messages.stream(**messages) as message_stream:
            message = await message_stream.get_final_message()
        (block,) = message.content
        assert block.type == "tool_use"
        assert message.stop_reason == "tool_use"
        assert block.name in names
        assert is_valid(block.input)


async def test_a_conversation_with_calls_goes_on_in_every_form() -> None:
    async with serving() as (http, _, _), openai_client(http) as client, anthropic_client(http) as other:
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        options: Any = {"model": "base", "tools": RESPONSE_TOOLS[:1], "max_output_tokens": 70}
        output = (await client.responses.create(input=items, tool_choice="required", **options)).output
        (call,) = output
        assert call.type == "function_call"
        items += [*output, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
        assert (await client.responses.create(input=items, **options)).output
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        options = {"model": "base", "tools": ANTHROPIC_TOOLS[:1], "max_tokens": 70}
        answer = await other.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
        (block,) = answer.content
        assert block.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        assert (await other.messages.create(messages=messages, **options)).content


async def test_an_answer_matches_its_schema() -> None:
    async with serving() as (http, _, _), openai_client(http) as client:
        definition = {"name": "answer", "schema": SCHEMA}
        chat_format: Any = {"type": "json_schema", "json_schema": definition}
        options: Any = {"model": "base", "messages": USER, "max_tokens": 60, "n": 4, "seed": 1}
        completion = await client.chat.completions.create(response_format=chat_format, **options)
        texts = [choice.message.content or "" for choice in completion.choices]
        assert all(is_valid(json.loads(text)) for text in texts)
        assert len(set(texts)) > 1
        assert {choice.finish_reason for choice in completion.choices} == {"stop"}
        text_format: Any = {"format": {"type": "json_schema", **definition}}
        response = await client.responses.create(model="base", input=QUESTION, text=text_format)
        assert is_valid(json.loads(response.output_text))
        free: Any = await client.chat.completions.create(response_format={"type": "text"}, **options)
        assert not any((choice.message.content or "").startswith("{") for choice in free.choices)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("responses", {"input": QUESTION, "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"input": QUESTION, "tools": [{"type": "web_search"}]}, "web_search"),
        ("responses", {"input": []}, "messages"),
        ("responses", {"input": QUESTION, "top_p": 0.5}, "top_p=0.5"),
        ("messages", {"messages": USER, "max_tokens": 5, "tools": [{"type": "bash", "name": "bash"}]}, "bash"),
        ("messages", {"messages": USER}, "max_tokens"),
        ("messages", {"messages": USER, "max_tokens": 5, "top_k": 4}, "top_k=4"),
        ("chat/completions", {"messages": USER, "tool_choice": "required"}, "does not offer"),
        ("chat/completions", {"messages": USER, "tools": CHAT_TOOLS, "tool_choice": "get"}, "not supported"),
        ("chat/completions", {"messages": USER, "response_format": {"type": "json_schema"}}, "with a schema"),
        (
            "chat/completions",
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}},
            "schema cannot be used",
        ),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(path: str, body: dict[str, Any], message: str) -> None:
    async with serving() as (http, _, _):
        response = await http.post(f"/v1/{path}", json={"model": "base"} | body)
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_clients_read_thinking_text_and_calls_of_one_answer() -> None:
    function = {"name": "get_order", "arguments": '{"ok": true}'}
    call = {"id": "call_0", "type": "function", "function": function}
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm", "tool_calls": [call]}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = {"id": "x", "created": 1, "usage": usage, "choices": [{"message": message, "finish_reason": "tool_calls"}]}
    response = responses.ResponsesRequest(model="base", input="x").response(answer)
    client = openai.OpenAI(api_key="none", http_client=stub_client(responses.event_lines(response)))
    with client, client.responses.stream(model="base", input="x") as stream:
        kinds = {event.type for event in stream}
        output = stream.get_final_response().output
    assert [item.type for item in output] == ["reasoning", "message", "function_call"]
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= kinds
    chat: Any = {"model": "base", "messages": USER, "max_tokens": 5}
    form = embedded_anthropic.MessagesRequest(**chat)
    lines = embedded_anthropic.event_lines(form.response(answer))
    other = anthropic.Anthropic(api_key="none", http_client=stub_client(lines))
    with other, other.messages.stream(**chat) as message_stream:
        content = message_stream.get_final_message().content
    assert [block.type for block in content] == ["thinking", "text", "tool_use"]
    assert content[2].type == "tool_use"
    assert content[2].input == {"ok": True}


def stub_client(lines: list[str]) -> httpx2.Client:
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, text="".join(lines), headers=headers))
    return httpx2.Client(transport=transport)


def test_objects_have_no_unnamed_properties_unless_they_say_so() -> None:
    open_object = {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "string"}}
    parts: Any = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    # A property may have the name of a keyword.
    nested = {"type": "object", "properties": {"items": {"properties": {"c": {}}}}}
    properties = {"properties": nested, "open": open_object, "parts": parts}
    schema = {"type": "object", "properties": properties, "$defs": {"d": {"properties": {}}}}
    result = structure.closed(schema)
    assert result["additionalProperties"] is False
    assert result["$defs"]["d"]["additionalProperties"] is False
    assert result["properties"]["properties"]["additionalProperties"] is False
    assert result["properties"]["properties"]["properties"]["items"]["additionalProperties"] is False
    assert (result["properties"]["open"], result["properties"]["parts"]) == (open_object, parts)
    assert (
        structure.closed({"items": {"anyOf": [{"properties": {}}]}})["items"]["anyOf"][0]["additionalProperties"]
        is False
    )


def test_two_tools_may_not_define_a_name_differently() -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"$defs": {"P": {"type": kind}}}}}
        for name, kind in (("f", "string"), ("g", "integer"))
    ]
    with pytest.raises(RequestError, match="'P'"):
        structure.call_schema(tools)


async def test_without_llguidance_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with serving() as (http, _, _):
        body = {"model": "base", "messages": USER, "response_format": {"type": "json_object"}}
        response = await http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == structure.MISSING
