"""An engine's errors in the form that OpenAI's clients read.

vLLM says the HTTP status as ``code`` and a Python class as ``type``; what stands behind a proxy may answer with plain
text. Clients tell a conversation that is too long, or a model that is gone, by ``code``. Invariants: what is in
OpenAI's form already is kept byte for byte; message and ``param`` are always kept, and fields that nobody knows.

Errors in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}.
"""

import json
from http import HTTPStatus
from typing import Any

from aiohttp import web


class Refusal(Exception):
    """A request that the router itself answers with an error; ``retry_after`` is in seconds."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def response(self) -> web.Response:
        """The answer to the client."""
        headers = {"Retry-After": str(self.retry_after)} if self.retry_after else None
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=headers)

    def body(self) -> bytes:
        """The JSON text."""
        told = {"message": self.message, "type": kind(self.status), "param": self.param, "code": self.code}
        return json.dumps({"error": told}).encode()


def kind(status: int) -> str:
    """OpenAI's word for what a status means."""
    if status == web.HTTPTooManyRequests.status_code:
        return "rate_limit_error"
    if status == web.HTTPUnauthorized.status_code:
        return "authentication_error"
    return "invalid_request_error" if status < web.HTTPInternalServerError.status_code else "server_error"


TOO_LONG = "maximum context length"
UNKNOWN = "does not exist"
LIMIT = 2000  # characters of a message that is no JSON


def in_openais_form(status: int, text: bytes) -> bytes:
    """The body of an engine's error."""
    try:
        told = json.loads(text)
    except ValueError:
        told = text.decode("utf-8", "replace").strip()[:LIMIT]
    found = _error(told)
    if isinstance(told, dict) and told.get("error") is found and _is_openais(found):
        return text
    message = str(found.get("message") or HTTPStatus(status).phrase)
    known = {"message": message, "type": kind(status), "param": found.get("param"), "code": _code(status, message)}
    return json.dumps({"error": found | known}).encode()


def _error(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict):
        return {"message": told if isinstance(told, str) else json.dumps(told)}
    if isinstance(told.get("error"), dict):
        return dict(told["error"]) if not _is_openais(told["error"]) else told["error"]
    return {"message": told.get("error") or told.get("message") or told.get("detail") or json.dumps(told)}


def _is_openais(error: dict[str, Any]) -> bool:
    texts = isinstance(error.get("message"), str) and isinstance(error.get("type"), str)
    return texts and (error.get("code") is None or isinstance(error["code"], str))


def _code(status: int, message: str) -> str | None:
    if status == HTTPStatus.BAD_REQUEST and TOO_LONG in message:
        return "context_length_exceeded"
    return "model_not_found" if status == HTTPStatus.NOT_FOUND and UNKNOWN in message else None
