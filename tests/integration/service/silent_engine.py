"""The Docker engine behind a socket of its own, which can fall silent: connections stay open, and nobody answers."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.docker_engine import DEFAULT_HOST

CHUNK = 2**16


class Engine:
    """Passes on what is said, until ``answers`` is cleared."""

    def __init__(self, path: Path) -> None:
        self.host = f"unix://{path}"
        self.answers = threading.Event()
        self.answers.set()
        self._real = os.environ.get("DOCKER_HOST", "") or DEFAULT_HOST
        self._sockets, self._threads = list[socket.socket](), list[threading.Thread]()
        self._listener = self._open()
        self._listener.bind(str(path))
        self._listener.listen()
        self._start(self._accept)

    def close(self) -> None:
        """Let go of everybody."""
        self.answers.set()
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for one in self._sockets:
            one.close()

    def _open(self) -> socket.socket:
        self._sockets.append(socket.socket(socket.AF_UNIX))
        return self._sockets[-1]

    def _start(self, work: Callable[..., None], *given: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=given, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking, engine = self._listener.accept()[0], self._open()
                self._sockets.append(asking)
                engine.connect(self._real.removeprefix("unix://"))
                self._start(self._pass_on, asking, engine)
                self._start(self._pass_on, engine, asking)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self.answers.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def engine_at(path: Path) -> Iterator[Engine]:
    engine = Engine(path)
    try:
        yield engine
    finally:
        engine.close()
