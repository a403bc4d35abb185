"""Requests to the service on its Unix socket: GET /alive, and the waiting stages of GET /status.

Uses only the standard library, so that a check every minute and ``traced status`` stay cheap. Not covered: readiness
(``/ready``).
"""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

from traced.core.errors import ServiceSilent

TIMEOUT_S = 5.0
STATUS_TIMEOUT_S = 1.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__("traced", timeout=timeout_s)
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


def waiting_stages(path: Path) -> dict[str, str]:
    """Return why stages of the running cycle have not begun, by stage; {} if no service says so within a second."""
    connection = _UnixConnection(path, STATUS_TIMEOUT_S)
    try:
        connection.request("GET", "/status")
        response = connection.getresponse()
        status: Any = json.loads(response.read()) if response.status == http.client.OK else {}
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    waits = status.get("waits", {}) if isinstance(status, dict) else {}
    return {str(stage): str(reason) for stage, reason in waits.items()} if isinstance(waits, dict) else {}
