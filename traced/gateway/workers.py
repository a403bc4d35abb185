"""Several processes of the gateway that share its port (``serving.workers``).

    traced serve ── worker 1 ── the port (SO_REUSEPORT: the kernel gives each new connection to one of them)
                 ├─ worker 2 ──/
                 ├─ the recorder
                 └─ the engine

Each worker is a gateway of its own; they share decisions, positions and quotas through the store, as routers on several
machines do. A worker that dies is restarted; its connections break, and the others go on. The side of a worker is
``traced.gateway.worker``.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

from traced.config.settings import Settings
from traced.core.location import http_url
from traced.gateway.app import address_errors
from traced.inference.engine_process import EngineProcess
from traced.inference.errors import ServingError
from traced.processes.child_process import RestartingProcess, start

# A worker waits this long for its requests to end; the daemon kills the gateway after 90 s.
GRACE_S = 85.0
# A worker that does not listen after this time is stopped; it may load adapters before.
START_S = 120.0


@asynccontextmanager
async def open_workers(
    settings: Settings, engines: Sequence[str]
) -> AsyncIterator[tuple[str, list[RestartingProcess]]]:
    """Run ``serving.workers`` gateways while the context is active.

    Yields:
        The URL, and the processes, which the caller has to supervise.

    Raises:
        ServingError: The address is in use, or a worker did not start, and why.
    """
    host = settings.serving.host
    with reserved_port(host, settings.serving.port) as port:
        workers = [
            RestartingProcess(f"worker {number}", partial(_start_worker, settings, port, number, engines))
            for number in range(1, settings.serving.workers + 1)
        ]
        try:
            # All of them, because a start on a thread cannot be cancelled.
            errors = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
            for error in filter(None, errors):
                raise error
            yield http_url(host, port), workers
        finally:
            # Threads of their own: the default ones are too few for all to stop at the same time.
            with ThreadPoolExecutor(len(workers)) as executor:
                loop = asyncio.get_running_loop()
                await asyncio.gather(*(loop.run_in_executor(executor, worker.stop) for worker in workers))


@contextlib.contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a port (0: any free one) that only sockets with SO_REUSEPORT of this user can share; yield its number.

    Raises:
        ServingError: The address is in use, also by another gateway that shares its port.
    """
    with address_errors(host, port):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Without SO_REUSEPORT, so that it fails beside any other socket of the port.
        with address_errors(host, port):
            probe.bind(address)
        port = probe.getsockname()[1]
    with socket.socket(family, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = (address[0], port, *address[2:])
        try:
            # Without SO_REUSEADDR, which would let the probe of another gateway bind beside it.
            reservation.bind(address)
        except OSError:
            # A connection of an earlier gateway has ended a moment ago.
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with address_errors(host, port):
                reservation.bind(address)
        # A socket that does not listen gets no connections.
        yield port


def _start_worker(settings: Settings, port: int, number: int, engines: Sequence[str]) -> EngineProcess:
    """Start a worker and wait until it listens; raises ``ServingError``."""
    read_end, write_end = os.pipe()
    command = ["-m", "traced.gateway.worker", "--data-dir", str(settings.data_dir), "--model", settings.model.spec]
    command += ["--port", str(port), "--number", str(number), "--ready-fd", str(write_end)]
    command += [f"--engine={url}" for url in engines]
    log_file = settings.data_dir / "logs" / f"worker-{number}.log"
    with open(read_end, "rb") as ready:
        try:
            child = start(command, log=log_file, pass_fds=[write_end])
        finally:
            os.close(write_end)
        # The pipe ends with the worker's message or with the worker.
        is_answered, _, _ = select.select([ready], [], [], START_S)
        message = ready.read() if is_answered else b""
    if not message:
        child.kill()
        reason = "; ".join(child.log.last_lines(1)) or "it wrote nothing"
        problem = "ended" if is_answered else f"did not listen within {START_S:.0f} s"
        raise ServingError(f"worker {number} of the router {problem}: {reason}", hint=f"read {log_file}")
    error = json.loads(message)
    if error is not None:
        child.stop(GRACE_S)
        raise ServingError(error["message"], hint=error["hint"])
    return EngineProcess("", log_file, child, GRACE_S)
