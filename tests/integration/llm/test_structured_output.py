"""Answers in a form from servers and models that would rather not: which way is found, and what goes back."""

import json
from typing import Any

import pytest

from agents.errors import ModelRefused, OutOfForm
from tests.integration.llm.llm_client import ANSWER, GOOD, Fault, ask, model, question, run
from tests.scripted_model import (
    Filtered,
    Message,
    NoChoices,
    Prose,
    Refusal,
    Scripted,
    ScriptedReply,
    Status,
    Text,
    Tool,
    Truncated,
    scripted_server,
)

NO_SCHEMA = "'response_format' of type 'json_schema' is not supported with this model."  # OpenAI's words


def way(body: dict[str, Any]) -> str:
    """How a request asks for its form."""
    if "response_format" in body:
        return "json_schema"
    return "tool call" if "tools" in body else "words" if "JSON Schema" in body["messages"][-1]["content"] else "none"


def ways(server: Scripted) -> list[str]:
    return [way(body) for body in server.requests]


def picky(takes: str) -> Any:
    """A server that understands one way only."""

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        if way(body) == "json_schema" != takes:
            return Status(400, message=NO_SCHEMA)
        if way(body) == "tool call" != takes:
            return Status(422, message="tools: extra fields not permitted")
        return Tool(GOOD) if takes == "tool call" else GOOD

    return script


@pytest.mark.parametrize(
    ("takes", "questions"),
    [
        ("json_schema", ["json_schema"]),
        ("tool call", ["json_schema", "tool call"]),
        ("words", ["json_schema", "tool call", "words"]),
    ],
)
def test_the_output_mode_of_a_server_is_detected_once_per_process(takes: str, questions: list[str]) -> None:
    with scripted_server(picky(takes)) as server:
        assert ask(model(server)) == ANSWER
        assert ways(server) == questions
        assert ask(model(server), question("And now?")) == ANSWER
        assert ways(server) == [*questions, takes]


@pytest.mark.parametrize("takes", ["tool call", "words"])
def test_a_way_that_is_taken_and_ignored_gives_way_to_the_next(takes: str) -> None:
    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        if way(body) != takes:
            return "I think that it was the agent."
        return Tool(GOOD) if takes == "tool call" else GOOD

    with scripted_server(script) as server:
        assert ask(model(server)) == ANSWER
        second_result = len(server.requests)
        assert ask(model(server), question("And now?")) == ANSWER
        assert ways(server)[second_result:] == [takes]
        assert "no JSON object in the answer" in server.requests[1]["messages"][-1]["content"]
        assert json.dumps(Fault.model_json_schema()) in server.requests[1]["messages"][-1]["content"]


def test_a_confirmed_output_mode_survives_an_invalid_answer() -> None:
    with scripted_server(lambda body, nth: "Hm." if nth == 1 else GOOD) as server:
        for text in ("one", "two"):
            assert ask(model(server), question(text)) == ANSWER
        assert ways(server) == ["json_schema"] * 3


@pytest.mark.parametrize(
    "answer",
    [
        Prose(GOOD),
        Text(f"<think>Is it {{x}}?</think>{json.dumps(GOOD)}"),
        Text('{"fault": "agent", "message": 3,}'),
        Tool(GOOD),
        Truncated(json.dumps(GOOD)),
        Text(json.dumps(GOOD), usage=None),
    ],
)
def test_prose_around_an_answer_costs_no_second_request(answer: Message) -> None:
    with scripted_server(answer) as server:
        assert ask(model(server)) == ANSWER
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"fault": "nobody", "message": 3}, "fault: Input should be 'agent' or 'simulator'"),
        ({"fault": "agent", "message": 3, "sure": True}, "sure: Extra inputs are not permitted"),
        ({"fault": "agent"}, "message: Field required"),
        ({"fault": "agent", "message": 99}, "there is no message 99"),
        (Refusal("I do not judge people."), "it refused: I do not judge people."),
        (Tool('{"fault": "agent", "mess'), "the JSON cannot be read"),
        (Text(""), "no JSON object"),
    ],
)
def test_an_invalid_answer_goes_back_with_the_objection(answer: ScriptedReply, complaint: str) -> None:
    def wrong(fault: Fault) -> str | None:
        return f"there is no message {fault.message}" if fault.message > 9 else None

    with scripted_server(lambda body, nth: GOOD if nth else answer) as server:
        assert ask(model(server), find_objection=wrong) == ANSWER
        message = server.requests[1]["messages"]
        assert [item["role"] for item in message] == ["system", "user", "assistant", "user"]
        assert message[2]["content"]  # some servers refuse an empty one
        assert complaint in message[3]["content"]
    with scripted_server(answer) as server:
        question = model(server)
        with pytest.raises(OutOfForm, match="no usable answer for analyze") as raised:
            ask(question, find_objection=wrong)
        assert complaint in str(raised.value)
        assert len(server.requests) == 1 + question.repairs


def test_an_answer_that_was_cut_off_is_asked_for_once_more_with_twice_the_tokens() -> None:
    truncation = Truncated('{"fault": "agent", ')
    with scripted_server(lambda body, nth: GOOD if nth else truncation) as server:
        assert ask(model(server)) == ANSWER
        assert [body["max_completion_tokens"] for body in server.requests] == [100, 200]
        assert "cut off after 3 tokens" in server.requests[1]["messages"][-1]["content"]
        assert ways(server) == ["json_schema"] * 2  # cut off is not ignored
    with scripted_server(truncation) as server:
        with pytest.raises(OutOfForm, match="cut off"):
            ask(model(server))
        assert len(server.requests) == 2


def test_a_filtered_answer_is_not_requested_again() -> None:
    with scripted_server(Filtered()) as server:
        with pytest.raises(OutOfForm, match="content filter"):
            ask(model(server))
        assert len(server.requests) == 1


def test_an_answer_without_choices_is_tried_again() -> None:
    with scripted_server(lambda body, nth: GOOD if nth else NoChoices()) as server:
        assert ask(model(server)) == ANSWER
        assert len(server.requests) == 2


def test_words_come_as_they_are() -> None:
    text = 'import json\n\nTEXT = "{x}"\n' * 50
    with scripted_server(text) as server:
        assert run(model(server), lambda llm: llm.write(question())) == text
        assert way(server.requests[0]) == "none"
        assert server.requests[0]["messages"][0] == {"role": "system", "content": "You judge. {braces} are text."}
        assert server.headers[0]["x-traced-record"] == "no"


@pytest.mark.parametrize("answer", [Truncated("import js"), Refusal(), Filtered("impo")])
def test_words_that_were_refused_or_never_end_are_none(answer: Message) -> None:
    with scripted_server(answer) as server, pytest.raises(OutOfForm, match="wrote nothing for analyze"):
        run(model(server), lambda llm: llm.write(question()))


def test_parameters_that_a_server_does_not_know_are_left_out_from_then_on() -> None:
    unknown = ["stream_options", "temperature", "max_completion_tokens"]

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        result = next((name for name in unknown if name in body), None)
        return GOOD if result is None else Status(400, message=f"Unsupported parameter: '{result}'")

    with scripted_server(script) as server:
        assert ask(model(server)) == ANSWER
        assert (server.requests[-1]["max_tokens"], way(server.requests[-1])) == (100, "json_schema")
        earlier = len(server.requests)
        assert ask(model(server), question("And now?")) == ANSWER
        assert len(server.requests) == earlier + 1


def test_a_request_that_is_never_understood_is_refused_and_teaches_nothing() -> None:
    with scripted_server(lambda body, nth: Status(400, message="bad words") if "bad" in str(body) else GOOD) as server:
        with pytest.raises(ModelRefused, match=r"status 400: bad words.*traced llm check"):
            ask(model(server), question("bad"))
        assert ask(model(server)) == ANSWER
        assert way(server.requests[-1]) == "json_schema"


def test_a_question_that_is_too_long_is_not_tried_in_other_ways() -> None:
    output = "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens"
    with scripted_server(Status(400, message=output, error_code="context_length_exceeded")) as server:
        with pytest.raises(ModelRefused, match=r"maximum context length.*context_tokens"):
            ask(model(server))
        assert len(server.requests) == 1


def test_the_context_bounds_the_answer_and_rejects_oversized_questions() -> None:
    with scripted_server(GOOD) as server:
        assert ask(model(server, context_tokens=300), question(max_tokens=4000)) == ANSWER
        assert 100 < server.requests[0]["max_completion_tokens"] < 300
        with pytest.raises(ModelRefused, match=r"about 3[0-9]+ tokens does not fit the 300 of the model"):
            ask(model(server, context_tokens=300), question("word " * 200))
        assert len(server.requests) == 1


def test_an_answer_without_end_is_not_read_on() -> None:
    with scripted_server(Text("all work and no play " * 20_000)) as server:
        with pytest.raises(OutOfForm, match=r"wrote nothing.*cut off"):
            run(model(server), lambda llm: llm.write(question(max_tokens=10)))
        assert len(server.requests) == 2
