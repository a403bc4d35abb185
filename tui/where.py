"""Which daemon to speak to, and what may be done there."""

from dataclasses import dataclass
from pathlib import Path

from traced.client import Client


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

    def client(self) -> Client:
        """A client of it."""
        return Client(self.socket) if self.socket else Client(url=self.url, token=self.token)
