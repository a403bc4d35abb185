"""What runs beside a router and is started again whenever it dies: its engine, and the way into the store.

Invariants: an engine comes back at the same URL, so that the pool knows it; between two starts there is a pause, longer
each time, and short again once it has lived for ``GOOD_S``. Not covered: what the pool does meanwhile.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Protocol

from traced.config import Settings
from traced.errors import TracedError
from traced.executor.process import start
from traced.models import resolve_model
from traced.serving.gateway.storing import GRACE_S
from traced.serving.process import EngineProcess, start_embedded
from traced.serving.vllm import VllmOptions, start_vllm

log = logging.getLogger(__name__)
LOOK_S = 0.2
GOOD_S = 60.0
PAUSES_S = (1.0, 2.0, 5.0, 15.0, 60.0)


class Running(Protocol):
    """A child process."""

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        ...

    def stop(self) -> None:
        """End it."""
        ...


class Kept:
    """One such child; ``begin`` starts it and returns when it is ready."""

    def __init__(self, name: str, begin: Callable[[], Running]) -> None:
        self._name, self._begin = name, begin
        self._running: Running | None = None
        self._over = False

    async def start(self) -> None:
        """Start it; raises what ``begin`` raises."""
        self._running = await asyncio.to_thread(self._begin)
        if self._over:  # it became ready as everything ended
            self._running.stop()

    async def keep(self) -> None:
        """Start it again whenever it dies, until cancelled."""
        failures, began = 0, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            if self._running is not None and self._running.alive:
                continue
            failures = 0 if time.monotonic() - began > GOOD_S else failures
            pause = PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            log.warning("%s ended; started again in %.0f s", self._name, pause)
            await asyncio.sleep(pause)
            failures, began = failures + 1, time.monotonic()
            try:
                await asyncio.to_thread(self._end)
                await self.start()
            except (TracedError, OSError) as error:
                log.warning("%s cannot be started: %s", self._name, error)

    def stop(self) -> None:
        """End it for good."""
        self._over = True
        self._end()

    def _end(self) -> None:
        if self._running is not None:
            self._running.stop()


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
