"""Errors in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}.

The gateway's own errors are ``Refusal``; errors of engines are converted. The conversion is needed because clients
recognize a conversation that is too long, or a missing model, by ``code``. vLLM however puts the HTTP status into
``code`` and a Python class into ``type``, and a proxy may answer with plain text. A body that already has OpenAI's form
is kept byte for byte; unknown fields are kept.
"""

import json
from http import HTTPStatus

from aiohttp import web

# Parts of vLLM's error messages; vLLM has no error codes.
CONTEXT_LENGTH_TEXT = "maximum context length"
MISSING_MODEL_TEXT = "does not exist"
# Anthropic's error types that depend on the status.
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# The maximum number of characters that are kept of an error that is not JSON.
MAX_TEXT = 2000


class Refusal(Exception):
    """An error with which the gateway itself answers a request; ``retry_after`` is in seconds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def response(self) -> web.Response:
        """Build the HTTP response."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)

    def body(self) -> bytes:
        """Return the error as JSON text."""
        error = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


def error_type(status: int) -> str:
    """Return OpenAI's error type for an HTTP status."""
    if status == web.HTTPTooManyRequests.status_code:
        return "rate_limit_error"
    if status == web.HTTPUnauthorized.status_code:
        return "authentication_error"
    return "invalid_request_error" if status < web.HTTPInternalServerError.status_code else "server_error"


def to_anthropic_error(status: int, body: bytes) -> bytes:
    """Convert an error in OpenAI's form to Anthropic's: {"type": "error", "error": {"type", "message"}}."""
    message = json.loads(body)["error"]["message"]
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


def to_openai_error(status: int, text: bytes) -> bytes:
    """Convert the body of an engine's error response to OpenAI's form."""
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode("utf-8", "replace").strip()[:MAX_TEXT]
    error = _error(body)
    if isinstance(body, dict) and body.get("error") is error and _is_openai_error(error):
        return text
    message = str(error.get("message") or HTTPStatus(status).phrase)
    code = _code(status, message)
    fields = {"message": message, "type": error_type(status), "param": error.get("param"), "code": code}
    return json.dumps({"error": error | fields}).encode()


def error_message(status: int, text: bytes) -> str:
    """Return the message in the body of an engine's error response."""
    return str(json.loads(to_openai_error(status, text))["error"]["message"])


def _error(body: object) -> dict[str, object]:
    if not isinstance(body, dict):
        return {"message": body if isinstance(body, str) else json.dumps(body)}
    if isinstance(body.get("error"), dict):
        return dict(body["error"]) if not _is_openai_error(body["error"]) else body["error"]
    return {"message": body.get("error") or body.get("message") or body.get("detail") or json.dumps(body)}


def _is_openai_error(error: dict[str, object]) -> bool:
    has_texts = isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
    return has_texts and (error.get("code") is None or isinstance(error["code"], str))


def _code(status: int, message: str) -> str | None:
    if status == HTTPStatus.BAD_REQUEST and CONTEXT_LENGTH_TEXT in message:
        return "context_length_exceeded"
    return "model_not_found" if status == HTTPStatus.NOT_FOUND and MISSING_MODEL_TEXT in message else None
