"""JSON lines over a container's attached stdio: requests pipelined, answers in order, each under a deadline.

Invariants: an answer must carry the id of the oldest open request, so nothing unasked is ever taken for an answer; at
most ``max_bytes`` of one line and ``STDERR_BYTES`` of stderr are held; the deadline runs for the oldest request alone
(the worker serves one at a time), so waiting behind others costs no call its time. The first failure ends the channel:
every open and later call raises it. Written requests of one turn of the event loop leave in one piece.

The stream is Docker's attach format (Engine API, "Attach to a container"): frames of one type byte, three zeros, and a
big-endian length. Not covered: starting and ending the container (``container.py``).
"""

import asyncio
import json
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sandbox.errors import Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied
from sandbox.wire import Answer, read_answer

STDERR_BYTES = 4096
GRACE_SECONDS = 3.0  # what the host allows beyond the worker's own deadline
_STDOUT, _STDERR = 1, 2


@dataclass
class _Open:
    id: int
    op: str
    budget: float
    future: "asyncio.Future[Answer]"


class Channel:
    """One stream to one worker. ``on_failure`` is awaited once, with the failure, to end the container.

    ``post_mortem`` is awaited when the stream ends by itself; it answers with the failure to report.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_bytes: int,
        post_mortem: Callable[[str], Awaitable[SandboxError]],
        on_failure: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._max_bytes = max_bytes
        self._post_mortem, self._on_failure = post_mortem, on_failure
        self._open: deque[_Open] = deque()
        self._unsent: list[bytes] = []
        self._next = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._stderr = b""
        self._overdue: asyncio.Task[None] | None = None
        self.failure: SandboxError | None = None
        self._reading = asyncio.create_task(self._read(), name="sandbox channel")

    async def call(self, op: str, budget: float, **fields: Any) -> Answer:
        """Ask and wait; returns an Answer with a value.

        Raises EnvironmentFault or Deadline for this call alone, and any other SandboxError when the channel has ended.
        """
        if self.failure is not None:
            raise self.failure
        self._next += 1
        request = {"id": self._next, "op": op, "budget": budget, **fields}
        line = json.dumps(request, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        if len(line) > self._max_bytes:
            raise EnvironmentFault(op, f"the message has {len(line)} bytes, more than {self._max_bytes}")
        entry = _Open(self._next, op, budget, asyncio.get_running_loop().create_future())
        self._open.append(entry)
        if len(self._open) == 1:
            self._watch()
        self._send(line)
        answer = await entry.future
        if answer.fault is not None:
            raise _as_error(op, budget, answer.fault)
        return answer

    def _send(self, line: bytes) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self.failure is None and not self._writer.is_closing():
            self._writer.write(data)

    def _watch(self) -> None:
        """Set the alarm for the oldest open request."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._open:
            seconds = self._open[0].budget + GRACE_SECONDS
            self._alarm = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        oldest = self._open[0]
        if self._fail(Deadline(oldest.op, oldest.budget + GRACE_SECONDS, "host")):
            self._overdue = asyncio.create_task(self._on_failure(), name="sandbox deadline")

    async def _read(self) -> None:
        try:
            await self._read_frames()
        except ProtocolFault as fault:
            await self._end(fault)
        except (OSError, EOFError):
            if self.failure is None:
                await self._end(await self._post_mortem(self._stderr.decode("utf-8", "backslashreplace")))

    async def _read_frames(self) -> None:
        partial: list[bytes] = []
        held = 0
        while True:
            kind, length = struct.unpack(">BxxxL", await self._reader.readexactly(8))
            data = await self._reader.readexactly(min(length, 1 << 24))
            if kind == _STDERR:
                self._stderr = (self._stderr + data)[-STDERR_BYTES:]
                continue
            if kind != _STDOUT or length > 1 << 24:
                raise ProtocolFault(f"the attached stream holds a frame of type {kind}, {length} bytes")
            *lines, rest = data.split(b"\n")
            for line in lines:
                self._take(b"".join([*partial, line]))
                partial, held = [], 0
            partial.append(rest)
            held += len(rest)
            if held > self._max_bytes:
                raise ProtocolFault(f"the worker wrote more than {self._max_bytes} bytes without ending the line")

    def _take(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            raise ProtocolFault(f"the worker wrote a line of {len(line)} bytes, more than {self._max_bytes}")
        answer = read_answer(line)
        if not self._open or self._open[0].id != answer.id:
            raise ProtocolFault(f"the worker answered request {answer.id}, which is not the oldest open one")
        entry = self._open.popleft()
        self._watch()
        if not entry.future.done():
            entry.future.set_result(answer)

    def _fail(self, failure: SandboxError) -> bool:
        """Remember the first failure and raise it in every open call; True that first time."""
        if self.failure is not None:
            return False
        self.failure = failure
        if self._alarm is not None:
            self._alarm.cancel()
        for entry in self._open:
            if not entry.future.done():
                entry.future.set_exception(failure)
            if isinstance(failure, Deadline):  # the others did not outlive theirs: they went down with the first
                failure = WorkerDied(None, False, str(failure))
        self._open.clear()
        self._writer.close()
        return True

    async def _end(self, failure: SandboxError) -> None:
        if self._fail(failure):
            await self._on_failure()

    async def close(self) -> None:
        """End the stream; open calls raise WorkerDied."""
        await self._end(WorkerDied(None, False, "the sandbox was closed"))
        self._reading.cancel()
        await asyncio.gather(self._reading, *([self._overdue] if self._overdue else []), return_exceptions=True)
        self._writer.close()


def _as_error(op: str, budget: float, fault: dict[str, str]) -> SandboxError:
    if fault["kind"] == "deadline":
        return Deadline(op, budget, "worker")
    if fault["kind"] == "raised":
        return EnvironmentFault(op, fault["error"], fault["traceback"])
    return ProtocolFault(f"the worker refused '{op}': {fault['error']}")
