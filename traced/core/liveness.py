"""Whether a data directory's service answers: GET /alive on its Unix socket, with the standard library alone.

Invariants: nothing is imported that a health check, asked every minute, would wait for. An answer other than 200 is
none. How it fails: ``ServiceSilent``. Not covered: whether it can work (``/ready``).
"""

import http.client
import socket
from pathlib import Path

from traced.core.errors import ServiceSilent

TIMEOUT_S = 5.0


class _Local(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("traced", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def ask_alive(path: Path) -> None:
    """Return when the service at this socket answers. Raises ``ServiceSilent``."""
    connection = _Local(path)
    try:
        connection.request("GET", "/alive")
        answer = connection.getresponse()
        said = "" if answer.status == http.client.OK else f"it answered {answer.status}"
    except (OSError, http.client.HTTPException) as error:
        said = str(error) or type(error).__name__
    finally:
        connection.close()
    if said:
        raise ServiceSilent(f"no service answers at {path}: {said}", hint="traced up")
