"""The same conversation in every API form on every engine, with the real clients: what is recorded chains.

A conversation has three answers: a forced call, an answer to its result, and one to "Thanks.". Two are streamed.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest

from store.database import read_session
from store.repositories.serving import list_exchanges
from tests.integration.engines.conftest import Deployment
from tests.waiting import eventually
from traced.ingest.conversations import HEADER, position, start_position

QUESTION = "Which order is it? W7."
SYSTEM = "Be brief."
RESULT = '{"state": "shipped"}'
SCHEMA = {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]}
FUNCTION = {"name": "get_order", "description": "Find an order.", "parameters": SCHEMA}
RESPONSES_TOOL = {"type": "function", "strict": False, **FUNCTION}
ROLES = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
# The choice of tools and whether the answer is streamed.
TURNS = (("required", True), ("none", False), ("none", True))
LIMIT = 40


def chat(deployment: Deployment, headers: dict[str, str]) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    options: Any = {"model": "base", "tools": tools, "temperature": 0, "max_tokens": LIMIT, "extra_headers": headers}
    for choice, streamed in TURNS:
        completions: Any = deployment.openai.chat.completions
        if streamed:
            # The client's own assembly refuses an answer that was cut off.
            with completions.stream(messages=messages, tool_choice=choice, **options) as stream:
                for _ in stream:
                    pass
                message: Any = stream.current_completion_snapshot.choices[0].message
        else:
            message = completions.create(messages=messages, tool_choice=choice, **options).choices[0].message
        messages.append(message)
        results = [{"role": "tool", "tool_call_id": c.id, "content": RESULT} for c in message.tool_calls or []]
        messages += results or [{"role": "user", "content": "Thanks."}]


def responses(deployment: Deployment, headers: dict[str, str]) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    for choice, streamed in TURNS:
        output = respond(deployment, headers, streamed=streamed, input=items, tool_choice=choice).output
        items += output
        items += results_of(output) or [{"role": "user", "content": "Thanks."}]


def responses_by_id(deployment: Deployment, headers: dict[str, str]) -> None:
    previous: dict[str, str] = {}
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for choice, streamed in TURNS:
        options = {"input": items, "tool_choice": choice, **previous}
        response = respond(deployment, headers, streamed=streamed, **options)
        retrieved = deployment.openai.responses.retrieve(response.id)
        assert [item.id for item in retrieved.output] == [item.id for item in response.output]
        previous = {"previous_response_id": response.id}
        items = results_of(response.output) or [{"role": "user", "content": "Thanks."}]


def respond(deployment: Deployment, headers: dict[str, str], *, streamed: bool, **options: Any) -> Any:
    options |= {"model": "base", "instructions": SYSTEM, "tools": [RESPONSES_TOOL], "temperature": 0}
    options |= {"max_output_tokens": LIMIT, "extra_headers": headers}
    if not streamed:
        return deployment.openai.responses.create(**options)
    with deployment.openai.responses.stream(**options) as stream:
        return stream.get_final_response()


def results_of(output: list[Any]) -> list[Any]:
    calls = [item for item in output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": RESULT} for call in calls]


def anthropics(deployment: Deployment, headers: dict[str, str]) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool = {"name": "get_order", "description": "Find an order.", "input_schema": SCHEMA}
    options: Any = {"model": "base", "system": SYSTEM, "tools": [tool], "messages": messages}
    sampling: Any = {"max_tokens": LIMIT, "extra_body": {"temperature": 0}, "extra_headers": headers}
    with anthropic.Anthropic(base_url=deployment.process.url, api_key="none", max_retries=0) as client:
        for choice, streamed in TURNS:
            options["tool_choice"] = {"type": "any" if choice == "required" else choice}
            if streamed:
                with client.messages.stream(**options, **sampling) as stream:
                    message: Any = stream.get_final_message()
            else:
                message = client.messages.create(**options, **sampling)
            assert client.messages.count_tokens(**options).input_tokens == message.usage.input_tokens
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls]
            messages.append({"role": "user", "content": results or "Thanks."})


@pytest.mark.parametrize("converse", [chat, responses, responses_by_id, anthropics])
def test_a_conversation_chains_in_every_form(deployment: Deployment, converse: Callable[..., None]) -> None:
    name = f"{deployment.kind}-{converse.__name__}"
    converse(deployment, {HEADER: name})

    def exchanges() -> list[Any]:
        with read_session(deployment.installation.store) as session:
            return list_exchanges(session, name)

    eventually(lambda: len(exchanges()) == 3)
    bodies = [exchange.body for exchange in exchanges()]
    for body, next_body in pairwise(bodies):
        assert start_position(next_body["messages"]) == position([*body["messages"], body["answer"]])
    messages = [*bodies[-1]["messages"], bodies[-1]["answer"]]
    assert [message["role"] for message in messages] == ROLES
    assert [messages[place]["content"] for place in (0, 1, 3, 5)] == [SYSTEM, QUESTION, RESULT, "Thanks."]
    (call,) = messages[2]["tool_calls"]
    assert call["function"]["name"] == "get_order"
    assert bodies[0]["tools"][0]["function"]["name"] == "get_order"


def test_an_answer_by_id_is_that_to_the_whole_input(deployment: Deployment) -> None:
    first = respond(deployment, {}, streamed=False, input=QUESTION, tool_choice="required")
    results = results_of(first.output)
    whole_input = [{"role": "user", "content": QUESTION}, *first.output, *results]
    expected = respond(deployment, {}, streamed=False, input=whole_input, tool_choice="none")
    answer = respond(deployment, {}, streamed=False, input=results, previous_response_id=first.id, tool_choice="none")
    assert (answer.output_text, answer.usage.input_tokens) == (expected.output_text, expected.usage.input_tokens)
    assert answer.usage.input_tokens > first.usage.input_tokens
    deployment.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as exc_info:
        respond(deployment, {}, streamed=False, input=results, previous_response_id=first.id)
    assert exc_info.value.code == "previous_response_not_found"
