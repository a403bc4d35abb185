"""JSON lines over a container's attached stdio: requests pipelined, answers in order, each under a deadline.

Invariants: an answer must carry the id of the oldest open request, so nothing unasked is ever taken for an answer; at
most ``max_bytes`` of one line and ``STDERR_BYTES`` of stderr are held, and more than ``STDERR_MOST`` ends it; the
deadline runs for the oldest request alone (the worker serves one at a time), so waiting behind others costs no call its
time. An answer that claims a deadline which was not yet over is the environment's own fault. The first failure ends the
channel: every open and later call raises it. Written requests of one turn of the event loop leave in one piece.

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

from sandbox.errors import AgentFault, Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied, clipped
from sandbox.wire import Answer, read_answer

STDERR_BYTES = 4096
STDERR_MOST = 1 << 20  # in a container's life; an honest worker writes there once, when its interpreter fails
FRAME_MOST = 1 << 24
GRACE_SECONDS = 3.0  # what the host allows beyond the worker's own deadline
EARLY = 0.99  # of its budget: no honest deadline is over before it, whatever the clocks' grain
_STDOUT, _STDERR = 1, 2


@dataclass
class _Open:
    id: int
    op: str
    budget: float
    asked: float  # the loop's time
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
        self._stderr_most = STDERR_MOST
        self._overdue: asyncio.Task[None] | None = None
        self.failure: SandboxError | None = None
        self._reading = asyncio.create_task(self._read(), name="sandbox channel")

    async def call(self, op: str, budget: float, **fields: Any) -> Answer:
        """Ask and wait; returns an Answer with a value.

        Raises EnvironmentFault, AgentFault or Deadline for this call alone, and any other SandboxError when the channel
        has ended.
        """
        if self.failure is not None:
            raise self.failure
        line = self._request({"id": self._next + 1, "op": op, "budget": budget, **fields})
        self._next += 1
        loop = asyncio.get_running_loop()
        entry = _Open(self._next, op, budget, loop.time(), loop.create_future())
        self._open.append(entry)
        if len(self._open) == 1:
            self._watch()
        self._send(line)
        answer = await entry.future
        if answer.fault is not None:
            raise _as_error(entry, answer.fault, loop.time() - entry.asked)
        return answer

    def _request(self, request: dict[str, Any]) -> bytes:
        """One line; half a character becomes "?", for no UTF-8 carries it. Raises AgentFault."""
        try:
            text = json.dumps(request, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        except (ValueError, RecursionError) as error:
            raise AgentFault(f"the message for '{request['op']}' is no JSON ({error})") from error
        line = text.encode("utf-8", "replace") + b"\n"
        if len(line) > self._max_bytes:
            raise AgentFault(f"the message for '{request['op']}' has {len(line)} bytes, more than {self._max_bytes}")
        return line

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
            if kind not in (_STDOUT, _STDERR) or length > FRAME_MOST:
                raise ProtocolFault(f"the attached stream holds a frame of type {kind}, {length} bytes")
            data = await self._reader.readexactly(length)
            if kind == _STDERR:
                self._hear(data)
                continue
            *lines, rest = data.split(b"\n")
            for line in lines:
                self._take(b"".join([*partial, line]))
                partial, held = [], 0
            partial.append(rest)
            held += len(rest)
            if held > self._max_bytes:
                raise ProtocolFault(f"the worker wrote more than {self._max_bytes} bytes without ending the line")

    def _hear(self, data: bytes) -> None:
        self._stderr = (self._stderr + data)[-STDERR_BYTES:]
        self._stderr_most -= len(data)
        if self._stderr_most < 0:
            raise ProtocolFault(f"the container wrote more than {STDERR_MOST} bytes to its stderr")

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


def _as_error(asked: _Open, fault: dict[str, str], took: float) -> SandboxError:
    op = asked.op
    if fault["kind"] == "deadline":
        if took < asked.budget * EARLY:
            return EnvironmentFault(op, f"it claimed to have outlived its {asked.budget:g} s after {took:.3f} s")
        return Deadline(op, asked.budget, "worker")
    if fault["kind"] == "raised":
        return EnvironmentFault(op, fault["error"], fault["traceback"])
    return ProtocolFault(f"the worker refused '{op}': {clipped(fault['error'], 500)}")
