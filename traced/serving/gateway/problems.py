"""Errors in the form that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

import json

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
