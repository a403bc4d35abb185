"""Health check of the service: GET /alive on its Unix socket.

Uses only the standard library, so that a check every minute stays cheap. Not covered: readiness (``/ready``).
"""

import http.client
import socket
from pathlib import Path

from traced.core.errors import ServiceSilent

TIMEOUT_S = 5.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("traced", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket file."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


def check_alive(path: Path) -> None:
    """Check that the service at this socket responds with status 200; raises ``ServiceSilent``."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/alive")
        response = connection.getresponse()
        problem = "" if response.status == http.client.OK else f"it responded with status {response.status}"
    except (OSError, http.client.HTTPException) as error:
        problem = str(error) or type(error).__name__
    finally:
        connection.close()
    if problem:
        raise ServiceSilent(f"no service responds at {path}: {problem}", hint="traced up")
