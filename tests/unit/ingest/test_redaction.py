"""What must not be stored is taken out before anything is."""

import json
import re
from typing import Any

import pytest

from store.records import Exchange
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.core.errors import ConfigError
from traced.ingest.redaction import REDACTED, Redactor
from traced.ingest.responses import exchange_of
from traced.ingest.spool import line_of

CARD = r"\b(?:\d[ -]?){13,16}\b"
NUMBER = "4111 1111 1111 1111"


def stored_exchange(
    redactor: Redactor, request: dict[str, Any], answer: str, *, streamed: bool, status: int = 200
) -> str:
    exchange, raw = Exchange("e", "c", T0, "base", status, 0.1), json.dumps(request).encode()
    redacted = redactor.line(line_of(exchange, raw, request, answer.encode(), streamed=streamed))
    exchange_of(json.loads(redacted))
    return redacted.decode()


def test_a_pattern_matches_in_any_text() -> None:
    arguments = json.dumps({"card": NUMBER, "deep": [{"email": "a@b.c"}]})
    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    request = {
        "model": "base",
        "user": "a@b.c",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"It is {NUMBER}."}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
    }
    answer = json.dumps({"id": "x", "choices": [{"message": {"role": "assistant", "content": f"Paid by {NUMBER}"}}]})
    text = stored_exchange(Redactor([CARD], ["email", "user"]), request, answer, streamed=False)
    assert "1111" not in text
    assert "a@b.c" not in text
    assert text.count("[redacted]") == 5


def test_a_match_across_two_chunks_of_a_stream_is_redacted() -> None:
    pieces = ["It is 4111 11", "11 1111 1", "111, thanks"]
    chunks = [json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
    answer = "".join(f"data: {chunk}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    text = stored_exchange(Redactor([CARD], []), {"messages": []}, answer, streamed=True)
    assert "It is [redacted], thanks" in text


@pytest.mark.parametrize("answer", [f"no JSON: {NUMBER}", json.dumps({"error": {"message": NUMBER}})])
def test_errors_are_redacted_too(answer: str) -> None:
    text = stored_exchange(Redactor([CARD], []), {"messages": []}, answer, streamed=False, status=500)
    assert "1111" not in text


def test_other_text_is_unchanged() -> None:
    redactor = Redactor([CARD], ["email"])
    for value in ("{not json", "[1", 'a "quoted" {word}', None, True, 3.5, ["x"], {"a": "é"}):
        assert redactor.value(value) == value
    assert not Redactor([], [])


def test_a_bad_pattern_is_refused_when_the_settings_are_read(tmp_path: Any) -> None:
    (tmp_path / "traced.toml").write_text('[serving]\nredact = ["(card"]\n')
    with pytest.raises(ConfigError, match="not a regular expression"):
        load_settings(tmp_path)


TOOL = {"type": "function", "function": {"name": "pay", "parameters": {"properties": {"email": {"type": "string"}}}}}
PROTOCOL = ["answer", "messages", "tools", "role", "content", "type", "function", "name", "email", "user", "arguments"]


def test_a_field_named_like_a_protocol_key_is_harmless() -> None:
    arguments = json.dumps({"name": "Ann", "amount": 3})
    call = {"id": "1", "type": "function", "function": {"name": "pay", "arguments": arguments}}
    question = {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "Hi"}]}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "name": "pay", "tool_call_id": "1", "content": '{"email": "a@b.c", "ok": true}'}
    redactor = Redactor([CARD], PROTOCOL)
    redacted_arguments = json.dumps({"name": "[redacted]", "amount": 3})
    redacted_messages = [
        {"role": "user", "name": "[redacted]", "content": [{"type": "text", "text": "Hi"}]},
        {**answer, "tool_calls": [{**call, "function": {"name": "pay", "arguments": redacted_arguments}}]},
        {**result, "content": '{"email": "[redacted]", "ok": true}'},
    ]
    request = {"messages": [question, answer, result], "tools": [TOOL], "user": "Ann", "metadata": {"email": "a@b.c"}}
    exchange, raw = Exchange("e", "c", T0, "base", 200, 0.1), json.dumps(request).encode()
    answer_bytes = json.dumps({"id": "x", "choices": [{"message": answer}]}).encode()
    line = json.loads(redactor.line(line_of(exchange, raw, request, answer_bytes, streamed=False)))
    body = {"messages": redacted_messages, "tools": [TOOL], "answer": redacted_messages[1]}
    assert exchange_of(line).body == body
    assert (line["request"]["user"], line["request"]["metadata"]) == ("[redacted]", {"email": "[redacted]"})
    complete = Exchange("e", "c", T0, "base", 200, 0.1, body={**request, "tools": [TOOL], "answer": answer})
    kept_body = redactor.exchange(complete).body or {}
    assert {name: kept_body[name] for name in body} == body
    failed = redactor.exchange(Exchange("e", "c", T0, "base", 500, 0.1, body={**body, "answer": None})).body or {}
    assert failed["answer"] is None


def test_patterns_apply_to_tool_definitions() -> None:
    tool = {"type": "function", "function": {"name": "pay", "description": f"like {NUMBER}"}}
    assert Redactor([CARD], ["name"]).definitions([tool])[0]["function"] == {
        "name": "pay",
        "description": "like [redacted]",
    }


def test_functions_of_the_responses_form_keep_their_names() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "pay", "arguments": '{"name": "Ann"}'}
    assert Redactor([], ["name"]).messages([call]) == [{**call, "arguments": '{"name": "[redacted]"}'}]


KEY = b"k" * 32


def test_the_same_text_has_the_same_pseudonym_wherever_it_is() -> None:
    redactor = Redactor(["P[0-9]{4}"], ["patient", "note", "is_adult", "age"], KEY)
    arguments = json.dumps({"patient": "P1001", "age": 41, "is_adult": True, "note": {"of": "P1001"}})
    call = {"id": "1", "type": "function", "function": {"name": "find_patient", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "P1001, not P1002, said P1001"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    question, answer = redactor.messages(messages)
    pseudonyms = re.findall(r"\[redacted-[a-z]{8}\]", question["content"])
    assert pseudonyms[0] == pseudonyms[2] != pseudonyms[1]
    values = json.loads(answer["tool_calls"][0]["function"]["arguments"])
    assert values["patient"] == pseudonyms[0]
    assert re.fullmatch(r"\[redacted-[a-z]{8}\]", values["age"])
    assert (values["is_adult"], values["note"]) == ("[redacted]", "[redacted]")
    assert not re.search("P100|41|true", json.dumps([question, answer]))


def test_a_pseudonym_depends_on_the_key() -> None:
    first, second = (Redactor(["P[0-9]{4}"], [], key).text("P1001") for key in (KEY, b"x" * 32))
    assert first != second
    assert Redactor(["P[0-9]{4}"], [], KEY).text("P1001") == first


def test_what_is_redacted_already_is_told_from_what_is_not() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": '{"email":"a@b.c", "of": "P1001"}'}
    for redactor in (Redactor(["P[0-9]{4}"], ["email"], KEY), Redactor(["P[0-9]{4}"], ["email"])):
        assert not redactor.is_redacted([result])
        assert redactor.is_redacted(redactor.messages([result]))
    # The spaces of JSON text without anything to redact stay.
    assert Redactor([], ["name"], KEY).is_redacted([result])


def test_redacted_names_stay_distinct() -> None:
    redactor = Redactor([r"\w+@\w+\.\w+"], [])
    ann, bob = redactor.name("ann@example.com/1"), redactor.name("bob@example.com/1")
    assert "ann" not in ann
    assert ann.startswith("[redacted-")
    assert ann.endswith("]/1")
    assert ann != bob
    assert redactor.name("ann@example.com/1") == ann


@pytest.mark.parametrize("redactor", [Redactor([CARD], []), Redactor([], ["card"])])
def test_values_that_are_nested_too_deeply_are_redacted(redactor: Redactor) -> None:
    deep: Any = {"card": NUMBER}
    for _ in range(600):
        deep = [deep]
    depth: Any = redactor.value({"deep": deep, "beside": "here", "inside": json.dumps(deep)})
    assert "1111" not in json.dumps(depth)
    assert REDACTED in json.dumps(depth["deep"])
    assert depth["beside"] == "here"
