"""Anthropic's form through the router, and what is recorded of conversations in every form."""

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.integration.gateway.place import V1, RunningGateway, running_gateway
from tests.waiting import eventually_async

QUESTION = "Please look up order W7."
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"order_id": {"type": "string"}}}
ANTHROPIC_TOOL: Any = {"name": "get_order", "description": "Find an order.", "input_schema": SCHEMA}
RESPONSES_TOOL = {"type": "function", "name": "get_order", "description": "Find an order.", "parameters": SCHEMA}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "get_order", "description": "Find an order.", "parameters": SCHEMA},
}
ROLES = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


async def run(tmp_path: Path, check: Callable[[RunningGateway], Coroutine[Any, Any, None]], **kind: Any) -> None:
    async with running_gateway(tmp_path, **kind) as gateway:
        await check(gateway)


def client_of(gateway: RunningGateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0)


async def converse_anthropic(gateway: RunningGateway) -> None:
    """Three turns, of which the second is streamed: a call, its result, thanks."""
    async with client_of(gateway) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        options: Any = {"model": "auto", "max_tokens": 60, "system": "Be brief.", "tools": [ANTHROPIC_TOOL]}
        first = await client.messages.create(messages=messages, **options)
        call = first.content[1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "shipped"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        async with client.messages.stream(messages=messages, **options) as stream:
            second = await stream.get_final_message()
        messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "Thanks."}]
        await client.messages.create(messages=messages, **options)


async def converse_responses(gateway: RunningGateway) -> None:
    """The same by ids."""
    previous, item = None, {"role": "user", "content": QUESTION}
    for streamed in (False, True, False):
        body = {"model": "auto", "instructions": "Be brief.", "tools": [RESPONSES_TOOL], "input": [item]}
        body |= {"previous_response_id": previous} if previous else {}
        answer = await gateway.http.post("/v1/responses", json=body | {"stream": streamed})
        if streamed:
            previous = answer.text.rsplit('"id": "resp_', 1)[1].split('"')[0].join(["resp_", ""])
            item = {"role": "user", "content": "Thanks."}
        else:
            previous = answer.json()["id"]
            call_id = answer.json()["output"][-1].get("call_id")
            item = {"type": "function_call_output", "call_id": call_id, "output": "shipped"}


@pytest.mark.parametrize("converse", [converse_anthropic, converse_responses])
async def test_a_conversation_becomes_one_trajectory_of_chat_messages(
    tmp_path: Path, converse: Callable[[RunningGateway], Coroutine[Any, Any, None]]
) -> None:
    async def check(gateway: RunningGateway) -> None:
        await converse(gateway)

        def roles() -> list[list[str]]:
            return [[message["role"] for message in trajectory.messages] for trajectory in gateway.trajectories()]

        # On a busy machine the conversation may count as ended, and become a trajectory, before its last turn.
        await eventually_async(lambda: roles() == [ROLES], message=roles)
        (trajectory,) = gateway.trajectories()
        contents = [message["content"] for message in trajectory.messages]
        answer_text = f"signed {V1}"
        assert contents == ["Be brief.", QUESTION, answer_text, "shipped", answer_text, "Thanks.", answer_text]
        (call,) = trajectory.messages[2]["tool_calls"]
        assert call["function"] == {"name": "get_order", "arguments": '{"order_id": "W7"}'}
        assert trajectory.messages[3]["tool_call_id"] == call["id"]
        assert (trajectory.model, trajectory.tools) == (V1, [CHAT_TOOL])
        exchanges = gateway.exchanges(trajectory.task_id)
        assert [exchange.prompt_tokens for exchange in exchanges] == [5, 5, 5]

    await run(tmp_path, check, live=V1, settings={"serving.silence_s": 1.5})


async def test_anthropics_client_counts_tokens_and_reads_errors(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        messages: Any = [{"role": "user", "content": QUESTION}]
        async with client_of(gateway) as client:
            for model in ("auto", "base", V1):
                assert (await client.messages.count_tokens(model=model, messages=messages)).input_tokens == 5
            for count in (client.messages.count_tokens, client.messages.create):
                options: Any = {} if count == client.messages.count_tokens else {"max_tokens": 5}
                with pytest.raises(anthropic.NotFoundError) as not_found:
                    await count(model="nobody", messages=messages, **options)
                body: Any = not_found.value.body
                assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
                assert "nobody" in body["error"]["message"]
            gateway.engine.status = 429
            with pytest.raises(anthropic.RateLimitError, match="slow down"):
                await client.messages.create(model="base", messages=messages, max_tokens=5)
            gateway.engine.status, gateway.engine.break_after, gateway.engine.delay_s = 200, 3, 0.05
            with pytest.raises(anthropic.APIStatusError, match="closed the connection"):
                async with client.messages.stream(model="base", messages=messages, max_tokens=5) as stream:
                    await stream.get_final_message()

    await run(tmp_path, check, live=V1)


async def test_the_path_names_the_form(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        # Without a system prompt and tools the chat form looks the same, but keeps lists of parts.
        content = [{"type": "text", "text": QUESTION}]
        body = {"model": "base", "max_tokens": 5, "messages": [{"role": "user", "content": content}]}
        response = await gateway.http.post("/v1/messages", json=body)
        conversation = response.headers["X-Traced-Conversation"]
        await eventually_async(lambda: gateway.exchanges(conversation))
        (exchange,) = gateway.exchanges(conversation)
        assert exchange.body is not None
        assert exchange.body["messages"] == [{"role": "user", "content": QUESTION}]

    await run(tmp_path, check)


async def test_only_the_model_changes_in_the_bytes_of_a_request(tmp_path: Path) -> None:
    async def check(gateway: RunningGateway) -> None:
        for path, body in (
            ("/v1/responses", b'{"model" : "base",\n "input": [ {"role":"user", "content": "x", "odd": 1e-7} ]}'),
            ("/v1/messages", b'{"model" : "base",\n "messages": [ {"role":"user", "content": "x"} ], "max_tokens":3}'),
        ):
            gateway.engine.bodies.clear()
            answer = await gateway.http.post(path, content=body)
            assert answer.status_code == 200, answer.text
            assert gateway.engine.bodies == [body.replace(b'"base"', b'"Qwen/some-base"')]

    await run(tmp_path, check)
