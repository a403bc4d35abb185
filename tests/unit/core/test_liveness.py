"""The service's waiting stages over its Unix socket."""

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from traced.core.liveness import waiting_stages


class _Handler(http.server.BaseHTTPRequestHandler):
    response = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/status" else 404)
        self.end_headers()
        self.wfile.write(self.response)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def service(path: Path, response: bytes) -> Iterator[None]:
    handler = type("Handler", (_Handler,), {"response": response})
    with socketserver.ThreadingUnixStreamServer(str(path), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def test_waits_are_those_of_the_service(tmp_path: Path) -> None:
    waits = {"train dates": "cpu: utilisation 90% is over 25%"}
    with service(tmp_path / "traced.sock", json.dumps({"running": "c1", "waits": waits}).encode()):
        assert waiting_stages(tmp_path / "traced.sock") == waits


@pytest.mark.parametrize("response", [b"{}", b"no JSON", b"[]", b'{"waits": []}'])
def test_other_responses_have_no_waits(tmp_path: Path, response: bytes) -> None:
    with service(tmp_path / "traced.sock", response):
        assert waiting_stages(tmp_path / "traced.sock") == {}


def test_without_a_service_nothing_waits(tmp_path: Path) -> None:
    assert waiting_stages(tmp_path / "traced.sock") == {}
