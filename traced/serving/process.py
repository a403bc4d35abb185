"""The embedded engine as a supervised child process.

``start_embedded`` returns when the engine answers ``/health`` or raises ``EngineStartError`` with the last lines of
its log. The child has a session of its own (a Ctrl-C in the terminal reaches the parent alone, which then stops the
engine in order) and never outlives its parent, even if the parent was killed (``traced.executor.process``).

The parent binds the socket and hands it over, so that a free port is never lost to another process in between.
"""

import contextlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from traced.executor.errors import StartError
from traced.executor.process import Child, start
from traced.serving.errors import EngineStartError

LOG_LINES = 12
LOGS_KEPT = 20  # of earlier engines, the newest
POLL_S = 0.1
STOP_S = 10.0
ERROR = re.compile(r"(^|\s)[A-Za-z_.]*(Error|Exception)\b: ")  # the last line of a traceback


@dataclass
class EngineProcess:
    """A running engine: its address, its log, and the handle to stop it. A context manager that stops it at the end."""

    url: str
    log: Path
    child: Child
    grace_s: float = STOP_S

    @property
    def pid(self) -> int:
        """Process id of the engine, which is also its process group's."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        """Whether the process is still there."""
        return not self.child.wait(0)

    def stop(self) -> None:
        """End the engine: asked first, killed with its whole group if it does not go. Stopping twice is harmless."""
        self.child.stop(self.grace_s)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_embedded(
    model_path: Path,
    *,
    data_dir: Path,
    port: int = 0,
    threads: int = 1,
    max_batch: int = 64,
    max_length: int = 2048,
    adapters: Mapping[str, Path] | None = None,
    timeout_s: float = 180.0,
) -> EngineProcess:
    """Start the engine on the loopback; ``port`` 0 takes a free one. Raises ``EngineStartError``."""
    with _bound_socket(port) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        log = data_dir / "logs" / f"engine-{listener.getsockname()[1]}.log"
        forget_old_logs(log.parent)
        options = {"threads": threads, "max-batch": max_batch, "max-length": max_length}
        engine = EngineProcess(url, log, _spawn(model_path, listener, log, options, adapters or {}))
    try:
        wait_ready(engine, timeout_s)
    except BaseException:
        engine.stop()
        raise
    return engine


def forget_old_logs(folder: Path, keep: int = LOGS_KEPT) -> None:
    """Delete the logs of all engines but the newest: a service starts one per stage, for months."""
    with contextlib.suppress(FileNotFoundError):  # somebody else deletes them as well
        by_age = sorted(folder.glob("engine-*.log*"), key=lambda log: log.stat().st_mtime, reverse=True)
        for log in by_age[keep:]:
            log.unlink()


def _bound_socket(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise EngineStartError(f"cannot listen on port {port}: {error}", hint="another port, or 0 for any") from error
    return listener


def _spawn(
    model_path: Path, listener: socket.socket, log: Path, options: Mapping[str, int], adapters: Mapping[str, Path]
) -> Child:
    command = ["-m", "traced.serving.embedded", "--die-with-parent"]
    command += ["--model", str(model_path), "--fd", str(listener.fileno())]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    for name, path in adapters.items():
        command += ["--adapter", f"{name}={path}"]
    log.unlink(missing_ok=True)
    threads = {"OMP_NUM_THREADS": str(options["threads"])}
    try:
        return start(command, log=log, variables=threads, pass_fds=[listener.fileno()])
    except StartError as error:
        raise EngineStartError(error.message, hint=error.hint) from error


def wait_ready(engine: EngineProcess, timeout_s: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Wait until an engine that was started answers. Raises ``EngineStartError`` with the end of its log."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        meanwhile()
        if not engine.alive:
            engine.stop()
            raise EngineStartError(
                f"the engine ended with exit code {engine.child.returncode} before it was ready; its log says:\n"
                f"{_last_lines(engine)}",
                hint=f"less {engine.log}",
            )
        try:
            if httpx.get(f"{engine.url}/health", timeout=1.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            time.sleep(POLL_S)
    raise EngineStartError(
        f"the engine did not answer within {timeout_s:.0f} s; its log says:\n{_last_lines(engine)}",
        hint=f"less {engine.log}",
    )


def _last_lines(engine: EngineProcess) -> str:
    lines = engine.child.log.last_lines(LOG_LINES)
    first = _first_error(engine.log)  # of several processes the one that failed first says why
    if first and first not in lines:
        lines = [first, "...", *lines]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"


def _first_error(log: Path) -> str:
    with contextlib.suppress(OSError), log.open(errors="replace") as lines:
        return next((line.rstrip() for line in lines if ERROR.search(line)), "")
    return ""
