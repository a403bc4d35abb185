"""What runs beside a router and is started again whenever it dies: its engine, and the way into the store.

Invariant: an engine comes back at the same URL, so that the pool knows it. Not covered: what the pool does meanwhile.
"""

import socket
from contextlib import closing

from traced.config import Settings
from traced.executor.kept import Kept, Running
from traced.executor.process import start
from traced.models import resolve_model
from traced.serving.gateway.spool import FILES
from traced.serving.gateway.storing import GRACE_S
from traced.serving.process import EngineProcess, start_embedded
from traced.serving.vllm import VllmOptions, start_vllm


def engine(settings: Settings) -> tuple[Kept, str]:
    """The engine that ``serving.engine`` names, and its URL."""
    port = _free_port()
    begin = _vllm if settings.serving.engine == "vllm" else _embedded
    return Kept("the engine", lambda: begin(settings, port)), f"http://127.0.0.1:{port}"


def storing(settings: Settings) -> Kept:
    """The way from the spool into the store."""

    def begin() -> Running:
        command = ["-m", "traced.serving.gateway.storing", "--data-dir", str(settings.data_dir)]
        log_file = settings.data_dir / "logs" / "storing.log"
        return EngineProcess("", log_file, start(command, log=log_file), GRACE_S)

    return Kept("the way into the store", begin)


def store_rest(settings: Settings) -> None:
    """Bring what a storer that died has left into the store; what cannot be waits for the next one."""
    if any((settings.data_dir / "spool").glob(FILES)):
        command = ["-m", "traced.serving.gateway.storing", "--once", "--data-dir", str(settings.data_dir)]
        child = start(command, log=settings.data_dir / "logs" / "storing.log")
        child.wait(GRACE_S)
        child.stop(0)


def _embedded(settings: Settings, port: int) -> EngineProcess:
    chosen = settings.engine
    return start_embedded(
        resolve_model(settings.model.spec, settings.data_dir).path,
        data_dir=settings.data_dir,
        port=port,
        threads=settings.threads,
        max_batch=chosen.max_batch,
        max_length=chosen.max_length,
        timeout_s=chosen.start_timeout_s,
    )


def _vllm(settings: Settings, port: int) -> EngineProcess:
    chosen = settings.serving
    options = VllmOptions(
        resolve_model(settings.model.spec, settings.data_dir).path,
        chosen.max_adapters,
        settings.training.lora_r,
        settings.engine.max_length,
        chosen.tool_parser,
        chosen.vllm_args,
        chosen.sleep_for_training,
    )
    wait = settings.engine.start_timeout_s
    return start_vllm(options, data_dir=settings.data_dir, port=port, timeout_s=wait, python=chosen.vllm_python)


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])
