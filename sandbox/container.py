"""One hardened container with one worker: started, spoken to, ended.

Invariants: the container exists only between ``start`` and ``close`` or the first failure; whatever ends it, it is
removed; an engine call never blocks the event loop. What starts and removes it runs in threads of its own, which end
before the interpreter does, and never in a task: one that is cancelled before its first step does nothing at all. When
this process is killed, the worker sees its input end and stops; its stopped container is left for
``docker_engine.reap_orphans``.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sandbox.channel import Channel
from sandbox.docker_engine import (
    attach,
    connect,
    create,
    detach,
    ended,
    engine_errors,
    labels,
    ran_out_of_memory,
    remove,
)
from sandbox.errors import ProtocolFault, SandboxError, WorkerDied
from sandbox.hashing import environment_hash, image_tag
from sandbox.policy import TRAINING_HASH_SEED, SandboxLimits
from sandbox.wire import Answer

T = TypeVar("T")

EXIT_WAIT_SECONDS = 10.0
LOAD_CALLS = 4  # loading the source may take as long as this many calls


@dataclass
class _Started:
    client: Any
    container: Any
    raw: socket.socket
    wrapper: Any

    def discard(self) -> None:
        """Remove the container and let go of the engine.

        The stream is shut first: an engine that still writes a flood to a socket which nobody reads can hold up the
        removal.
        """
        with suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)
        try:
            remove(self.container)
        finally:
            detach(self.wrapper)
            self.client.close()


class Sandbox:
    """A running container with the source loaded; make it with ``await Sandbox.start(...)``."""

    def __init__(self, started: _Started, limits: SandboxLimits) -> None:
        self._started = started
        self._limits = limits
        self._removal: Future[None] | None = None
        self._channel: Channel | None = None

    @classmethod
    async def start(
        cls, source_code: str, *, limits: SandboxLimits, hash_seed: int = TRAINING_HASH_SEED, owner: str
    ) -> "Sandbox":
        """Start a container and load the source; raises any SandboxError, after which nothing is left running."""
        starting = _on_a_thread("sandbox start", lambda: _start(source_code, limits, hash_seed, owner))
        try:
            started = await asyncio.shield(asyncio.wrap_future(starting))
        except asyncio.CancelledError:
            starting.add_done_callback(_discard_late)
            raise
        sandbox = cls(started, limits)
        try:
            await sandbox._load(source_code)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _load(self, source_code: str) -> None:
        channel = Channel(
            max_bytes=self._limits.message_kb * 1024, post_mortem=self._post_mortem, on_failure=self._begin_removal
        )
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=self._started.raw)
        self._channel = channel
        await self._channel.call(
            "effects", self._limits.start_seconds
        )  # the worker is up: a slow start is not the source's
        await self._channel.call("load", self._limits.call_seconds * LOAD_CALLS, source=source_code)

    @property
    def failure(self) -> SandboxError | None:
        """What ended this sandbox, if anything has."""
        return self._channel.failure if self._channel else None

    @property
    def container_id(self) -> str:
        """The engine's id of the container."""
        return str(self._started.container.id)

    async def call(self, op: str, *, budget: float | None = None, **fields: Any) -> Answer:
        """One operation of the worker (see ``worker.py``); ``budget`` in seconds, by default the limits' own."""
        assert self._channel is not None
        return await self._channel.call(op, budget or self._limits.call_seconds, **fields)

    async def ran_out_of_memory(self) -> bool:
        """Whether any process in it was killed for memory so far, as the engine tells it; raises EngineDown."""
        return await asyncio.to_thread(ran_out_of_memory, self._started.container)

    async def close(self, within_s: float | None = None) -> None:
        """End and remove the container; may be called twice. ``within_s``: what the engine has for each answer.

        A cancellation is raised when the container is gone.
        """
        if within_s is not None:
            self._started.client.api.timeout = within_s
        if self._channel is not None:
            self._channel.close()
        removed = asyncio.wrap_future(self._begin_removal())
        cancelled: asyncio.CancelledError | None = None
        while not removed.done():
            try:
                await asyncio.wait([removed])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled from removed.exception()
        removed.result()

    def _begin_removal(self) -> Future[None]:
        """Once, whoever asks first."""
        if self._removal is None:
            self._removal = _on_a_thread("sandbox end", self._started.discard)
        return self._removal

    async def _post_mortem(self, stderr: str) -> SandboxError:
        exit_code, oom = await asyncio.to_thread(ended, self._started.container, EXIT_WAIT_SECONDS)
        if exit_code is None:
            return ProtocolFault("the container closed its output while it still ran")
        return WorkerDied(exit_code, oom, stderr)


def _start(source_code: str, limits: SandboxLimits, hash_seed: int, owner: str) -> _Started:
    client = connect()
    container = wrapper = None
    try:
        command = ["--call-seconds", str(limits.call_seconds), "--episodes", str(limits.episodes)]
        command += ["--message-kb", str(limits.message_kb)]
        marks = labels(owner, environment_hash(source_code))
        container = create(client, image_tag(), command, limits=limits, labels=marks, hash_seed=hash_seed)
        raw, wrapper = attach(container)
        with engine_errors(image_tag()):
            container.start()
        return _Started(client, container, raw, wrapper)
    except BaseException:
        try:
            if container is not None:
                remove(container)
        finally:
            if wrapper is not None:
                detach(wrapper)
            client.close()
        raise


def _on_a_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Begin ``work`` on a thread of its own, which the interpreter waits for at its end."""
    thread = ThreadPoolExecutor(1, name)
    future = thread.submit(work)
    thread.shutdown(wait=False)
    return future


def _discard_late(starting: Future[_Started]) -> None:
    """The caller was cancelled while the thread was starting a container: nobody else will remove it.

    Called in that thread, for the event loop may be closed by then, as after Ctrl-C.
    """
    if not starting.cancelled() and starting.exception() is None:
        starting.result().discard()
