"""Which daemon to speak to, and what may be done there."""

from dataclasses import dataclass
from pathlib import Path

from traced.client import Client, ClientError, Refused

NOT_KNOWN = 401


@dataclass(frozen=True)
class Where:
    """A daemon's socket, or its URL with a token; ``read_only`` offers no act, whatever the token would allow."""

    socket: Path | None = None
    url: str = ""
    token: str = ""
    read_only: bool = False

    @property
    def name(self) -> str:
        """As a person knows it."""
        return self.url or str(self.socket)

    def refusal(self, error: ClientError) -> tuple[str, str]:
        """What went wrong, and what to do about it, in the words of who started this interface."""
        if not isinstance(error, Refused) or error.status != NOT_KNOWN:
            return error.message, error.hint
        return (
            "the daemon does not know the token" if self.token else "the daemon asks for a token",
            "--token-file FILE",
        )

    def client(self) -> Client:
        """A client of it."""
        return Client(self.socket) if self.socket else Client(url=self.url, token=self.token)
