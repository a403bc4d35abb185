"""JSON lines over a container's attached stdio: requests pipelined, answers in order, each under a deadline.

Invariants: an answer must carry the id of the oldest open request, so nothing unasked is ever taken for an answer; at
most ``max_bytes`` of one line and ``STDERR_BYTES`` of stderr are held, and more than ``STDERR_MOST`` ends it; the
deadline runs for the oldest request alone (the worker serves one at a time), so waiting behind others costs no call its
time. No call is late for the host's own slowness: what has arrived is read before a call is given up, and an event loop
that is held up is charged for one part of the time (``PARTS``) however long that took. An answer that claims a deadline
which was not yet over is the environment's own fault. The first failure ends the channel: every open and later call
raises it. Written requests of one turn of the event loop leave in one piece.

The stream is Docker's attach format (Engine API, "Attach to a container"): frames of one type byte, three zeros, and a
big-endian length. Not covered: starting and ending the container (``container.py``).
"""

import asyncio
import json
import select
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sandbox.errors import AgentFault, Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied, clipped
from sandbox.wire import Answer, read_answer

STDERR_BYTES = 4096
STDERR_MOST = 1 << 20  # in a container's life; an honest worker writes there once, when its interpreter fails
GRACE_SECONDS = 3.0  # what the host allows beyond the worker's own deadline
PARTS = 8  # in which that time goes by, one after the other
EARLY = 0.99  # of its budget: no honest deadline is over before it, whatever the clocks' grain
_STDOUT, _STDERR = 1, 2
_HEADER = struct.Struct(">BxxxL")


@dataclass
class _Open:
    id: int
    op: str
    budget: float
    asked: float  # the loop's time
    future: "asyncio.Future[Answer]"


class Channel(asyncio.Protocol):
    """One stream to one worker. ``on_failure`` is called once, at the first failure, to begin the container's end.

    ``post_mortem`` is awaited when the stream ends by itself; it answers with the failure to report.
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        post_mortem: Callable[[str], Awaitable[SandboxError]],
        on_failure: Callable[[], object],
    ) -> None:
        self._max_bytes = max_bytes
        self._post_mortem, self._on_failure = post_mortem, on_failure
        self._transport: asyncio.Transport | None = None  # none before the stream begins and after it has ended
        self._open: deque[_Open] = deque()
        self._unsent: list[bytes] = []
        self._next = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._parts = 0  # that the oldest call has left
        self._frames = _Frames()
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._stderr = b""
        self._stderr_most = STDERR_MOST
        self._judging: asyncio.Task[None] | None = None
        self.failure: SandboxError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream begins."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

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
        if self._transport is not None:
            self._transport.write(data)

    def _watch(self) -> None:
        """Set the alarm for the oldest open request."""
        self._mute()
        if self._open and self._transport is not None:
            self._parts = PARTS
            self._set_alarm()

    def _set_alarm(self) -> None:
        part = (self._open[0].budget + GRACE_SECONDS) / PARTS
        self._alarm = asyncio.get_running_loop().call_later(part, self._ring)

    def _mute(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self) -> None:
        self._parts -= 1
        if self._parts > 0:
            self._set_alarm()
        elif self._is_unread():
            self._alarm = asyncio.get_running_loop().call_later(0, self._ring)  # the loop reads before it rings
        else:
            oldest = self._open[0]
            self._end(Deadline(oldest.op, oldest.budget + GRACE_SECONDS, "host"))

    def _is_unread(self) -> bool:
        """Whether something has arrived that was not read yet; a line can only grow to its bound, so this ends."""
        assert self._transport is not None
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def data_received(self, data: bytes) -> None:
        """Read what has arrived."""
        try:
            for kind, part in self._frames.cut(data):
                if self.failure is not None:
                    return
                if kind == _STDERR:
                    self._hear(part)
                else:
                    self._gather(part)
        except ProtocolFault as fault:
            self._end(fault)

    def _gather(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._take(b"".join([*self._line, line]))
            self._line, self._line_bytes = [], 0
        self._line.append(rest)
        self._line_bytes += len(rest)
        if self._line_bytes > self._max_bytes:
            raise ProtocolFault(f"the worker wrote more than {self._max_bytes} bytes without ending the line")

    def connection_lost(self, exc: Exception | None) -> None:
        """The stream has ended; by itself where nothing has failed, and then the engine says what has."""
        self._transport = None
        self._mute()
        if self.failure is None:
            self._judging = asyncio.create_task(self._judge(), name="sandbox post-mortem")

    async def _judge(self) -> None:
        self._end(await self._post_mortem(self._stderr.decode("utf-8", "backslashreplace")))

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

    def _end(self, failure: SandboxError) -> None:
        """The first failure: remembered, raised in every open call, and the container ended."""
        if self.failure is not None:
            return
        self.failure = failure
        self._mute()
        for entry in self._open:
            if not entry.future.done():
                entry.future.set_exception(failure)
            if isinstance(failure, Deadline):  # the others did not outlive theirs: they went down with the first
                failure = WorkerDied(None, False, str(failure))
        self._open.clear()
        if self._transport is not None:
            self._transport.abort()
        self._on_failure()

    def close(self) -> None:
        """End the stream; open calls raise WorkerDied."""
        if self._judging is not None:
            self._judging.cancel()
        self._end(WorkerDied(None, False, "the sandbox was closed"))


class _Frames:
    """Docker's framing taken off, wherever the stream was cut; what is held is less than a header."""

    def __init__(self) -> None:
        self._kept = b""
        self._kind = 0
        self._rest = 0  # of the frame under way

    def cut(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The stream's number (1 stdout, 2 stderr) and a part of what came through it; raises ProtocolFault."""
        data = self._kept + data
        at = 0
        while len(data) - at >= (1 if self._rest else _HEADER.size):
            if not self._rest:
                self._kind, self._rest = _HEADER.unpack_from(data, at)
                if self._kind not in (_STDOUT, _STDERR):
                    raise ProtocolFault(f"the attached stream holds a frame of type {self._kind}, {self._rest} bytes")
                at += _HEADER.size
                continue
            part = data[at : at + self._rest]
            at += len(part)
            self._rest -= len(part)
            yield self._kind, part
        self._kept = data[at:]


def _as_error(asked: _Open, fault: dict[str, str], took: float) -> SandboxError:
    op = asked.op
    if fault["kind"] == "deadline":
        if took < asked.budget * EARLY:
            return EnvironmentFault(op, f"it claimed to have outlived its {asked.budget:g} s after {took:.3f} s")
        return Deadline(op, asked.budget, "worker")
    if fault["kind"] == "raised":
        return EnvironmentFault(op, fault["error"], fault["traceback"])
    return ProtocolFault(f"the worker refused '{op}': {clipped(fault['error'], 500)}")
