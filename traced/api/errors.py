"""Errors of the control API, each with its HTTP status.

ServiceError (a TracedError)
├── NotAllowed          the role does not permit the action (403)
├── NotKnown            the caller is not authenticated (401)
├── Busy                conflict with what runs now (409)
├── NoSuchThing         unknown name (404)
├── CallerDisconnected  the caller disconnected before the response (499)
├── BadRequest          malformed request (422)
├── BadMessage          malformed message in a played episode (422)
├── EnvironmentBroke    the played environment raised or broke its contract (502)
├── Crowded             too many concurrent readers (503, with Retry-After)
├── SandboxOut          no container, or it ended unexpectedly (503)
├── EarlierRefusal      the request was refused when it came first
└── DoorError           the socket or port cannot be opened
"""

from store.errors import NotFound, StoreError, StoreUnavailable
from traced.client.models import Problem
from traced.core.errors import TracedError


class ServiceError(TracedError):
    """The service refused or failed a request."""

    status = 400


class NotAllowed(ServiceError):
    """The caller's role does not permit the action."""

    status = 403


class NotKnown(ServiceError):
    """The caller is not authenticated."""

    status = 401


class Busy(ServiceError):
    """The request conflicts with what runs now."""

    status = 409


class NoSuchThing(ServiceError):
    """The name is unknown."""

    status = 404


class BadRequest(ServiceError):
    """The request is malformed."""

    status = 422


class CallerDisconnected(ServiceError):
    """The caller disconnected before the response, which nobody else can use."""

    status = 499


class BadMessage(ServiceError):
    """A message in a played episode is malformed."""

    status = 422


class EnvironmentBroke(ServiceError):
    """The played environment raised or broke its contract."""

    status = 502


class Crowded(ServiceError):
    """There are too many concurrent readers."""

    status = 503
    retry_after_s = 5


class SandboxOut(ServiceError):
    """No container could be started, or it ended unexpectedly."""

    status = 503


class EarlierRefusal(ServiceError):
    """The request was refused when it came first; ``kind`` is the type of that error, ``status`` its HTTP status."""

    def __init__(self, message: str, *, hint: str = "", kind: str, status: int) -> None:
        super().__init__(message, hint=hint)
        self.kind, self.status = kind, status


class DoorError(ServiceError):
    """The socket or port cannot be opened."""

    status = 500


def problem_of(error: Exception) -> Problem:
    """Return the body of the response to a request that failed by this error."""
    kind = error.kind if isinstance(error, EarlierRefusal) else type(error).__name__
    return Problem(type=kind, message=getattr(error, "message", str(error)), hint=getattr(error, "hint", ""))


def status_of(error: Exception) -> int:
    """Return the HTTP status of the response to a request that failed by this error."""
    if isinstance(error, ServiceError):
        return error.status
    if isinstance(error, NotFound):
        return 404
    if isinstance(error, StoreUnavailable):
        return 503
    return 409 if isinstance(error, TracedError | StoreError) else 500
