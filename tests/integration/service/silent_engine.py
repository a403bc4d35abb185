"""A proxy of the Docker engine's socket that can stop answering while its connections stay open."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sandbox.docker_engine import DEFAULT_HOST

CHUNK = 2**16


class Engine:
    """Proxy of the Docker engine; it forwards data while ``answers`` is set."""

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
        """Shut down all connections and join the threads."""
        self.answers.set()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for connection in self._sockets:
            connection.close()

    def _open(self) -> socket.socket:
        self._sockets.append(socket.socket(socket.AF_UNIX))
        return self._sockets[-1]

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, engine = self._listener.accept()[0], self._open()
                self._sockets.append(connection)
                engine.connect(self._real.removeprefix("unix://"))
                self._start(self._pass_on, connection, engine)
                self._start(self._pass_on, engine, connection)

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
