"""The same requests to every engine through the router: the same answers, the same errors.

Where the embedded engine does less it says so with 400 and the field's name; ``UNSUPPORTED`` is all of it.
Answers are compared with those of the bundled model in this process.
"""

import json
from typing import Any

import openai
import pytest

from benchmarks.engines.signed_adapters import questions
from tests.integration.engines.conftest import LENGTH, LIVE, Deployment
from traced.inference.chat_format import ChatFormat
from traced.inference.embedded.engine import Engine, Request, Sampling
from traced.targets.desk import SPLITS, Desk, demonstrate

USER = questions(1, seed=3)[0]
PROMPT = "Which order"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_order",
        "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
    },
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
CHOICE = {"choice": ["yes", "no"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
UNSUPPORTED: dict[str, tuple[str, dict[str, Any], int]] = {
    "top_p": ("chat/completions", {"messages": USER, "top_p": 0.5, "temperature": 1}, 400),
    "presence_penalty": ("chat/completions", {"messages": USER, "presence_penalty": 0.5}, 400),
    "logit_bias": ("chat/completions", {"messages": USER, "logit_bias": {"7": 5}}, 400),
    "structured_outputs": ("chat/completions", {"messages": USER, "structured_outputs": CHOICE}, 400),
    "min_tokens": ("completions", {"prompt": PROMPT, "min_tokens": 3}, 400),
    "echo": ("completions", {"prompt": PROMPT, "echo": True}, 400),
    "several prompts": ("completions", {"prompt": [PROMPT, PROMPT]}, 400),
}


def greedy(reference: Engine, prompt_ids: list[int], count: int, top: int = 0) -> Any:
    return reference.generate([Request(prompt_ids, Sampling(0.0, count, top_logprobs=top))])[0]


def text_of(reference: Engine, ids: list[int]) -> str:
    return str(reference.tokenizer.decode(ids, skip_special_tokens=True))


def events(deployment: Deployment, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's events; it has to end with [DONE]."""
    answer = deployment.http.post(path, json=body | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_chat_is_the_models_answer(deployment: Deployment, reference: Engine) -> None:
    for messages in questions(5, seed=8):
        prompt = ChatFormat(reference.tokenizer).render(messages, [])
        generation = greedy(reference, prompt, 24)
        answer = deployment.chat(messages, max_tokens=24, tools=None, metadata={"team": "x"}, no_such_field=[1])
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == text_of(reference, generation.ids)
        assert not choice["message"].get("tool_calls")
        counts = {"prompt_tokens": len(prompt), "completion_tokens": len(generation.ids)}
        assert {key: answer["usage"][key] for key in counts} == counts


def test_text_is_the_models_answer(deployment: Deployment, reference: Engine) -> None:
    generation = greedy(reference, reference.tokenizer.encode(PROMPT), 9)
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    answer = deployment.http.post("/v1/completions", json=body)
    (choice,) = answer.json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text_of(reference, generation.ids), generation.finish_reason)
    assert answer.headers["X-Traced-Model"] == "base"
    ids = body | {"prompt": reference.tokenizer.encode(PROMPT)}
    assert deployment.http.post("/v1/completions", json=ids).json()["choices"][0]["text"] == choice["text"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_is_the_whole_answer_in_pieces(deployment: Deployment, path: str) -> None:
    body: dict[str, Any] = {"model": LIVE[0], "max_tokens": 9, "temperature": 0}
    chat = "chat" in path
    body |= {"messages": USER} if chat else {"prompt": PROMPT}
    response = deployment.http.post(path, json=body).json()
    pieces = events(deployment, path, body | {"stream_options": {"include_usage": True}})
    choices = [choice for piece in pieces for choice in piece["choices"]]
    text = "".join((choice["delta"].get("content") or "") if chat else choice["text"] for choice in choices)
    (choice,) = response["choices"]
    assert text == (choice["message"]["content"] if chat else choice["text"])
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert pieces[-1]["choices"] == []
    for count in ("prompt_tokens", "completion_tokens"):
        assert pieces[-1]["usage"][count] == response["usage"][count]


def test_tool_calls_are_parsed_whole_and_streamed(deployment: Deployment, reference: Engine) -> None:
    seed = SPLITS["train"][0]
    tools, demonstration = Desk().reset(seed).tools, demonstrate(seed, {}, 0).messages
    messages = demonstration[:4]
    generation = greedy(reference, ChatFormat(reference.tokenizer).render(messages, tools), 80)
    (tool_call,) = ChatFormat(reference.tokenizer).parse(generation.ids)["tool_calls"]
    (choice,) = deployment.chat(messages, tools=tools, max_tokens=80)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["id"]
    assert call["function"]["name"] == tool_call["function"]["name"]
    assert json.loads(call["function"]["arguments"]) == json.loads(tool_call["function"]["arguments"])
    assert choice["finish_reason"] == "tool_calls"
    body = {"model": "base", "messages": messages, "tools": tools, "max_tokens": 80, "temperature": 0}
    deltas = [c["delta"] for piece in events(deployment, "/v1/chat/completions", body) for c in piece["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls") or []]
    assert "".join(part.get("name") or "" for part in parts) == tool_call["function"]["name"]
    assert json.loads("".join(part.get("arguments") or "" for part in parts)) == json.loads(
        tool_call["function"]["arguments"]
    )


def test_logprobs_are_the_models(deployment: Deployment, reference: Engine) -> None:
    generation = greedy(reference, ChatFormat(reference.tokenizer).render(USER, []), 4, top=3)
    (choice,) = deployment.chat(USER, max_tokens=4, logprobs=True, top_logprobs=3)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in entries] == pytest.approx(generation.logprobs, abs=1e-3)
    for entry, top in zip(entries, generation.top, strict=True):
        logprobs = [logprob_entry["logprob"] for logprob_entry in entry["top_logprobs"]][:3]
        assert logprobs == pytest.approx(list(top.values()), abs=1e-3)
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 3, "temperature": 0, "logprobs": 2}
    text_logprobs = deployment.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    text_generation = greedy(reference, reference.tokenizer.encode(PROMPT), 3)
    assert text_logprobs["token_logprobs"] == pytest.approx(text_generation.logprobs, abs=1e-3)
    assert [len(top) for top in text_logprobs["top_logprobs"]] == [2, 2, 2]


def test_a_seed_repeats_and_several_answers_differ(deployment: Deployment) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 11, "n": 4, "max_tokens": 8}
    first, second = (deployment.chat(USER, **sampling)["choices"] for _ in range(2))
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    messages = [choice["message"] for choice in first]
    assert [choice["message"]["content"] for choice in second] == [message["content"] for message in messages]
    assert len({json.dumps(message["content"]) for message in messages}) > 1
    response = deployment.http.post(
        "/v1/chat/completions", json={"model": "base", "messages": USER, "n": 2, "temperature": 0}
    )
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_length_and_stop_end_an_answer(deployment: Deployment) -> None:
    word = deployment.installation.versions[LIVE[0]].word
    (choice,) = deployment.chat(USER, LIVE[0], max_tokens=3)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (word * 3, "length")
    for stop in (word + word, ["nowhere", word[1:] + word[0]]):
        (stopped_choice,) = deployment.chat(USER, LIVE[0], max_tokens=9, stop=stop)["choices"]
        assert stopped_choice["finish_reason"] == "stop"
        assert stopped_choice["message"]["content"] in ("", word[:1], None)


def test_models_lists_the_available_versions(deployment: Deployment) -> None:
    assert [model.id for model in deployment.openai.models.list()] == ["auto", "base", *LIVE]
    answer = deployment.openai.chat.completions.create(model=deployment.base, messages=USER, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.NotFoundError) as exc_info:
        deployment.openai.chat.completions.create(model="nobody", messages=USER)  # type: ignore[arg-type]
    assert exc_info.value.code == "model_not_found"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_context_that_is_too_long_has_openais_code(deployment: Deployment, path: str) -> None:
    long: dict[str, Any] = {"prompt": [5] * (LENGTH + 1)}
    if "chat" in path:
        long = {"messages": [{"role": "user", "content": "order " * LENGTH}]}
    response = deployment.http.post(path, json={"model": "base", "max_tokens": 4, **long})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["code"] == "context_length_exceeded", error
    assert str(LENGTH) in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", "{oops"),
        ("chat/completions", "[]"),
        ("chat/completions", {"model": "base"}),
        ("chat/completions", {"model": "base", "messages": []}),
        ("chat/completions", {"model": "base", "messages": USER, "temperature": -1}),
        ("chat/completions", {"model": "base", "messages": USER, "max_tokens": 0}),
        ("chat/completions", {"model": "base", "messages": USER, "max_tokens": "many"}),
        ("chat/completions", {"model": "base", "messages": USER, "n": 0}),
        ("completions", {"model": "base"}),
        ("completions", {"model": "base", "prompt": [10**9]}),
        ("completions", {"model": "base", "prompt": ""}),
    ],
)
def test_invalid_requests_get_an_error_in_openais_form(deployment: Deployment, path: str, body: Any) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    response = deployment.http.post(f"/v1/{path}", content=content)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_the_embedded_engine_refuses_unsupported_fields_by_name(deployment: Deployment, field: str) -> None:
    path, body, status = UNSUPPORTED[field]
    answer = deployment.http.post(f"/v1/{path}", json={"model": "base", "temperature": 0, "max_tokens": 40} | body)
    if deployment.kind == "embedded":
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    else:
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_order"}}])
def test_a_forced_tool_is_called(deployment: Deployment, choice: Any) -> None:
    answer = deployment.chat(USER, tools=[TOOL], tool_choice=choice, max_tokens=60)
    for call in answer["choices"][0]["message"]["tool_calls"]:
        assert call["function"]["name"] == "get_order"
        assert set(json.loads(call["function"]["arguments"])) == {"order_id"}
    assert deployment.answer_text(USER, response_format=FORMAT, max_tokens=40).startswith('{"ok":')
    if deployment.kind != "embedded":
        assert deployment.answer_text(USER, structured_outputs=CHOICE, max_tokens=40) in CHOICE["choice"]


def test_health_and_readiness(deployment: Deployment) -> None:
    assert deployment.http.get("/alive").json() == {"alive": True}
    assert deployment.http.get("/ready").json() == {
        "ready": True,
        "engines": {deployment.engine: "ok"},
        "recording": "ok",
        "routing": {deployment.engine: {"router": "labels"}},
    }
