"""An engine's errors in OpenAI's form."""

import json
from typing import Any

import pytest

from traced.gateway.errors import to_openai_error


@pytest.mark.parametrize(
    ("status", "message", "code", "param"),
    [
        (400, "This model's maximum context length is 1024 tokens.", "context_length_exceeded", "input_tokens"),
        (404, "The model `x` does not exist.", "model_not_found", "model"),
        (400, "temperature must be non-negative", None, "temperature"),
    ],
)
def test_vllms_errors_get_openais_codes(status: int, message: str, code: str | None, param: str) -> None:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": status, "more": 1}
    converted = json.loads(to_openai_error(status, json.dumps({"error": error}).encode()))["error"]
    kind = "invalid_request_error"
    assert converted == {"message": message, "type": kind, "param": param, "code": code, "more": 1}


def test_openais_form_is_kept_byte_for_byte() -> None:
    text = b'{ "error": {"message": "slow", "type": "busy", "param": null, "code": "x", "more": [1e-7]} }'
    assert to_openai_error(429, text) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"error":"out of memory"}', "out of memory"),
        (b'{"error":{"message":3,"type":"x","code":null}}', "3"),
        (b'["odd"]', '["odd"]'),
        (b"Internal Server Error\xff", "Internal Server Error\ufffd"),
        (b"", "Internal Server Error"),
        (b"{}", "{}"),
        (b"null", "null"),
    ],
)
def test_every_engine_error_keeps_its_text(text: bytes, message: str) -> None:
    converted: dict[str, Any] = json.loads(to_openai_error(500, text))["error"]
    assert converted == {"message": message, "type": "server_error", "param": None, "code": None}
