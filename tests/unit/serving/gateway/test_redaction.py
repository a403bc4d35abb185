"""What must not be stored is taken out before anything is."""

import json
from typing import Any

import pytest

from store.serving_records import Exchange
from tests.unit.store.chain import T0
from traced.config import load_settings
from traced.errors import ConfigError
from traced.serving.gateway.reading import exchange_of
from traced.serving.gateway.redaction import Redactor
from traced.serving.gateway.spool import line_of

CARD = r"\b(?:\d[ -]?){13,16}\b"
NUMBER = "4111 1111 1111 1111"


def kept(redactor: Redactor, request: dict[str, Any], answer: str, *, streamed: bool, status: int = 200) -> str:
    exchange, raw = Exchange("e", "c", T0, "base", status, 0.1), json.dumps(request).encode()
    redacted = redactor.line(line_of(exchange, raw, request, answer.encode(), streamed=streamed))
    exchange_of(json.loads(redacted))
    return redacted.decode()


def test_a_pattern_is_found_wherever_it_stands() -> None:
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
    text = kept(Redactor([CARD], ["email", "user"]), request, answer, streamed=False)
    assert "1111" not in text
    assert "a@b.c" not in text
    assert text.count("[redacted]") == 5


def test_a_pattern_that_falls_into_two_pieces_of_a_stream_is_found() -> None:
    pieces = ["It is 4111 11", "11 1111 1", "111, thanks"]
    chunks = [json.dumps({"id": "x", "choices": [{"index": 0, "delta": {"content": piece}}]}) for piece in pieces]
    answer = "".join(f"data: {chunk}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    text = kept(Redactor([CARD], []), {"messages": []}, answer, streamed=True)
    assert "It is [redacted], thanks" in text


@pytest.mark.parametrize("answer", [f"no JSON: {NUMBER}", json.dumps({"error": {"message": NUMBER}})])
def test_errors_are_redacted_too(answer: str) -> None:
    text = kept(Redactor([CARD], []), {"messages": []}, answer, streamed=False, status=500)
    assert "1111" not in text


def test_what_no_rule_speaks_of_stays() -> None:
    redactor = Redactor([CARD], ["email"])
    for value in ("{not json", "[1", 'a "quoted" {word}', None, True, 3.5, ["x"], {"a": "é"}):
        assert redactor.value(value) == value
    assert not Redactor([], [])


def test_a_bad_pattern_is_refused_when_the_settings_are_read(tmp_path: Any) -> None:
    (tmp_path / "traced.toml").write_text('[serving]\nredact = ["(card"]\n')
    with pytest.raises(ConfigError, match="no regular expression"):
        load_settings(tmp_path)
