"""The tokens that a response reports."""

import json

import pytest

from traced.gateway.metrics import usage_of

CHOICE = {"message": {"content": 'text with "usage": {"prompt_tokens": 999}'}}


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"choices": [CHOICE], "usage": {"prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3}}, (7, 3)),
        ({"output": [CHOICE], "usage": {"input_tokens": 7, "output_tokens": 3}}, (7, 3)),
        ({"choices": [CHOICE], "usage": None}, (0, 0)),
        ({"choices": [CHOICE]}, (0, 0)),
        ({}, (0, 0)),
    ],
)
def test_usage_is_read_from_the_end_of_a_response(answer: object, tokens: tuple[int, int]) -> None:
    text = json.dumps(answer).encode()
    assert usage_of(text) == tokens
    assert usage_of(bytearray(b"data: {}\n\ndata: " + text + b"\n\ndata: [DONE]\n\n")) == tokens
