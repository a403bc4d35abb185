"""What can go wrong between a client and the daemon.

ClientError (a TracedError)
├── NoDaemon   nothing answers at the socket or address
└── Refused    the daemon answered with an error; ``status`` and the daemon's own message and hint
"""

from traced.errors import TracedError


class ClientError(TracedError):
    """The daemon could not be asked."""


class NoDaemon(ClientError):
    """Nothing answers at the socket or address."""


class Refused(ClientError):
    """The daemon answered with an error."""

    def __init__(self, message: str, *, hint: str = "", status: int) -> None:
        super().__init__(message, hint=hint)
        self.status = status
