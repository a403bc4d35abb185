"""Errors of the control API, each with its HTTP status.

ServiceError (a TracedError)
├── NotAllowed        the role does not permit the action (403)
├── NotKnown          the caller is not authenticated (401)
├── Busy              conflict with what runs now (409)
├── NoSuchThing       unknown name (404)
├── CallerGone        the caller disconnected before the response (499)
├── BadRequest        malformed request (422)
├── BadMessage        malformed message in a played episode (422)
├── EnvironmentBroke  the played environment raised or broke its contract (502)
├── Crowded           too many concurrent readers (503, with Retry-After)
├── SandboxOut        no container, or it ended unexpectedly (503)
└── DoorError         the socket or port cannot be opened
"""

from traced.core.errors import TracedError


class ServiceError(TracedError):
    """The service could not do what was asked."""

    status = 400


class NotAllowed(ServiceError):
    """The caller's role does not reach that far."""

    status = 403


class NotKnown(ServiceError):
    """The caller is not who may ask at all."""

    status = 401


class Busy(ServiceError):
    """What is asked for is at odds with what runs now."""

    status = 409


class NoSuchThing(ServiceError):
    """Nothing has that name."""

    status = 404


class BadRequest(ServiceError):
    """What was sent is nothing that can be asked for."""

    status = 422


class CallerDisconnected(ServiceError):
    """Whoever asked has hung up, and the answer is of use to nobody else."""

    status = 499


class BadMessage(ServiceError):
    """What somebody who plays an episode sent is no message."""

    status = 422


class EnvironmentBroke(ServiceError):
    """The environment that is played raised, or broke the contract."""

    status = 502


class Crowded(ServiceError):
    """Too many look at once for another to have its turn."""

    status = 503
    retry_after_s = 5


class SandboxOut(ServiceError):
    """No container to play in, or it was ended from outside."""

    status = 503


class DoorError(ServiceError):
    """The socket or port cannot be opened."""

    status = 500
