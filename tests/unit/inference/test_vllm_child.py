"""The watch over vLLM's server: which states of the server end its process, and when."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from traced.inference import vllm_child
from traced.inference.engine_process import free_port
from traced.inference.vllm_child import address, check_health, end_if_unhealthy


class Server(ThreadingHTTPServer):
    """Answers every request with ``status``, after ``release`` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.status = 200
        self.release = threading.Event()
        self.release.set()


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.release.wait(10)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


def test_health_is_known_by_the_status_and_by_refused_connections(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(server.server_address[1])
    assert check_health("127.0.0.1", port) is True
    server.status = 503
    assert check_health("127.0.0.1", port) is False
    assert check_health("127.0.0.1", free_port()) is False
    monkeypatch.setattr(vllm_child, "TIMEOUT_S", 0.05)
    server.release.clear()
    assert check_health("127.0.0.1", port) is None


# Each list has the states of the server in seconds of 1; the last one stays.
@pytest.mark.parametrize(
    ("states", "ended_at_s"),
    [
        pytest.param([False] * 50 + [True, False], 50 + 5, id="a start takes its time, a dead engine does not"),
        pytest.param([True, False, False, False, True, False], 4 + 5, id="a server that recovers goes on"),
        pytest.param([True, *[None] * 50, False], 50 + 5, id="a late answer is no sign of a dead engine"),
        pytest.param([None] * 9 + [False] * 9 + [True, False], 18 + 5, id="a late answer is no sign of health"),
    ],
)
def test_a_server_that_stays_unhealthy_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], states: list[bool | None], ended_at_s: int
) -> None:
    clock = {"s": 0}
    monkeypatch.setattr(vllm_child, "check_health", lambda host, port: states[min(clock["s"], len(states) - 1)])

    def sleep(seconds: float) -> None:
        clock["s"] += int(seconds)

    monkeypatch.setattr(vllm_child, "time", SimpleNamespace(monotonic=lambda: clock["s"], sleep=sleep))
    codes: list[int] = []
    end_if_unhealthy("127.0.0.1", 1, unhealthy_s=5, poll_s=1, end=codes.append)
    assert (clock["s"], codes) == (ended_at_s, [1])
    assert "the engine is dead" in capfd.readouterr().err


def test_the_last_value_of_a_flag_counts() -> None:
    assert address(["--port", "1", "--model", "m", "--port=2", "--host", "0.0.0.0"]) == ("0.0.0.0", 2)
    assert address(["--portable", "--port", "3"]) == ("127.0.0.1", 3)
