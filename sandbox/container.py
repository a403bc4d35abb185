"""Start, call and end one hardened container that runs one worker.

Invariants: the container exists only between ``start`` and ``close`` or the first failure, and is always removed. If
this process is killed, the worker reads the end of its input and stops; ``docker_engine.reap_orphans`` then removes the
container.
"""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from docker import DockerClient
from docker.models.containers import Container

from sandbox.channel import Channel
from sandbox.docker_engine import (
    attach,
    connect,
    create,
    detach,
    engine_errors,
    labels,
    ran_out_of_memory,
    remove,
    wait_for_exit,
)
from sandbox.errors import EngineDown, ProtocolFault, SandboxError, WorkerDied
from sandbox.hashing import environment_hash, image_tag
from sandbox.policy import TRAINING_HASH_SEED, SandboxLimits
from sandbox.wire import Answer

T = TypeVar("T")

EXIT_WAIT_SECONDS = 10.0
# Loading a source takes longer than a step, so its budget is the time of this many calls.
LOAD_BUDGET_CALLS = 4


@dataclass
class _AttachedContainer:
    client: DockerClient
    container: Container
    raw: socket.socket
    wrapper: Any

    def discard(self) -> None:
        """Remove the container and disconnect from the engine."""
        # Shut the stream first: an engine that writes much output to an unread socket can delay the removal.
        with suppress(OSError):
            self.raw.shutdown(socket.SHUT_RDWR)
        try:
            remove(self.container)
        finally:
            detach(self.wrapper)
            self.client.close()


class Sandbox:
    """A running container that has loaded a source; created by ``await Sandbox.start(...)``."""

    def __init__(self, attached: _AttachedContainer, limits: SandboxLimits) -> None:
        self._attached = attached
        self._limits = limits
        self._removal: Future[None] | None = None
        self._channel: Channel | None = None

    @classmethod
    async def start(
        cls, source_code: str, *, limits: SandboxLimits, hash_seed: int = TRAINING_HASH_SEED, owner: str
    ) -> "Sandbox":
        """Start a container and load the source; after a SandboxError, nothing is left running."""
        start_future = _run_in_thread("sandbox start", lambda: _start(source_code, limits, hash_seed, owner))
        try:
            attached = await asyncio.shield(asyncio.wrap_future(start_future))
        except asyncio.CancelledError:
            start_future.add_done_callback(_discard_abandoned)
            raise
        sandbox = cls(attached, limits)
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
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=self._attached.raw)
        self._channel = channel
        # The first call returns once the worker runs, so a slow start of the container does not count as loading time.
        await self._channel.call("effects", self._limits.start_seconds)
        await self._channel.call("load", self._limits.call_seconds * LOAD_BUDGET_CALLS, source=source_code)

    @property
    def failure(self) -> SandboxError | None:
        """The failure that ended this sandbox, if any."""
        return self._channel.failure if self._channel else None

    @property
    def container_id(self) -> str:
        """The engine's id of the container."""
        return str(self._attached.container.id)

    async def call(self, op: str, *, budget: float | None = None, **fields: object) -> Answer:
        """Run an operation of the worker (``worker.py``) in ``budget`` seconds, by default ``limits.call_seconds``."""
        assert self._channel is not None
        return await self._channel.call(op, budget or self._limits.call_seconds, **fields)

    async def ran_out_of_memory(self) -> bool:
        """Return whether any process of this container was killed for lack of memory; raises EngineDown."""
        return await asyncio.to_thread(ran_out_of_memory, self._attached.container)

    async def close(self, within_s: float | None = None) -> None:
        """End and remove the container; may be called twice.

        Args:
            within_s: seconds that the engine has for each response; by default the client's timeout applies.
        """
        if within_s is not None:
            self._attached.client.api.timeout = within_s
        if self._channel is not None:
            self._channel.close()
        removal = asyncio.wrap_future(self._begin_removal())
        # A cancellation is raised only after the removal: otherwise the container would keep running.
        cancelled: asyncio.CancelledError | None = None
        while not removal.done():
            try:
                await asyncio.wait([removal])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled from removal.exception()
        removal.result()

    def _begin_removal(self) -> Future[None]:
        # Both ``close`` and the channel's first failure call this; the container is removed once.
        if self._removal is None:
            self._removal = _run_in_thread("sandbox end", self._attached.discard)
        return self._removal

    async def _post_mortem(self, stderr: str) -> SandboxError:
        try:
            exit_code, oom = await asyncio.to_thread(wait_for_exit, self._attached.container, EXIT_WAIT_SECONDS)
        except EngineDown as error:
            return error
        if exit_code is None:
            return ProtocolFault("the container closed its output while it still ran")
        return WorkerDied(exit_code, oom, stderr)


def _start(source_code: str, limits: SandboxLimits, hash_seed: int, owner: str) -> _AttachedContainer:
    client = connect()
    container = wrapper = None
    try:
        command = ["--call-seconds", str(limits.call_seconds), "--episodes", str(limits.episodes)]
        command += ["--message-kb", str(limits.message_kb)]
        container_labels = labels(owner, environment_hash(source_code))
        container = create(client, image_tag(), command, limits=limits, labels=container_labels, hash_seed=hash_seed)
        raw, wrapper = attach(container)
        with engine_errors(image_tag()):
            container.start()
        return _AttachedContainer(client, container, raw, wrapper)
    except BaseException:
        try:
            if container is not None:
                remove(container)
        finally:
            if wrapper is not None:
                detach(wrapper)
            client.close()
        raise


def _run_in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run ``work`` in a new thread."""
    # Not an asyncio task, because a task that is cancelled before its first step does nothing. The interpreter waits
    # for these threads before it exits.
    thread = ThreadPoolExecutor(1, name)
    future = thread.submit(work)
    thread.shutdown(wait=False)
    return future


def _discard_abandoned(start_future: Future[_AttachedContainer]) -> None:
    """Remove the container of a start whose caller was cancelled."""
    # This runs in the thread that started the container, because after Ctrl-C the event loop may be closed.
    if not start_future.cancelled() and start_future.exception() is None:
        start_future.result().discard()
