"""Exchange JSON lines with a worker over its container's attached stdio.

Requests are pipelined, responses arrive in order, and each call has a deadline. The stream is Docker's attach format
(Engine API, "Attach to a container"): frames of one type byte, three zeros and a big-endian length.

Invariants: a response must carry the id of the oldest pending request; at most ``max_bytes`` of a line and
``STDERR_BYTES`` of stderr are held; the first failure ends the channel, and every pending and later call raises it. Not
covered: starting and ending the container (``container.py``).
"""

import asyncio
import json
import select
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from sandbox.errors import AgentFault, Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied, clipped
from sandbox.wire import Answer, read_answer

STDERR_BYTES = 4096
# Limit over the container's lifetime. An honest worker writes to stderr once, when its interpreter fails.
STDERR_LIFETIME_BYTES = 1 << 20
# The host allows this much beyond the worker's own deadline, so that the worker reports first.
GRACE_SECONDS = 3.0
# The host times a deadline in this many parts: a blocked event loop costs a call at most one part of its budget.
PARTS = 8
# A deadline that the worker reports counts only if this share of the budget has passed on the host's clock; the rest
# allows for the clocks' resolution.
DEADLINE_TOLERANCE = 0.99
_STDOUT, _STDERR = 1, 2
_HEADER = struct.Struct(">BxxxL")


@dataclass
class _PendingCall:
    id: int
    op: str
    budget: float
    # In seconds of the event loop's clock.
    sent_at: float
    future: "asyncio.Future[Answer]"


class Channel(asyncio.Protocol):
    """The stream to one worker.

    Args:
        post_mortem: awaited with the worker's stderr when the stream ends by itself; returns the failure to report.
        on_failure: called once, at the first failure, to start the container's removal.
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
        # None before the stream is connected and after it has ended.
        self._transport: asyncio.Transport | None = None
        self._pending: deque[_PendingCall] = deque()
        self._unsent: list[bytes] = []
        self._last_id = 0
        self._timer: asyncio.TimerHandle | None = None
        # Timer parts that are left to the oldest pending call.
        self._parts_left = 0
        self._frames = _Frames()
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._stderr = b""
        self._stderr_budget = STDERR_LIFETIME_BYTES
        self._post_mortem_task: asyncio.Task[None] | None = None
        self.failure: SandboxError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport once the stream is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def call(self, op: str, budget: float, **fields: object) -> Answer:
        """Send a request and return its response.

        Raises EnvironmentFault, AgentFault, ProtocolFault or Deadline for a failure of this call alone, and the
        channel's failure, which may be any SandboxError, once the channel has ended.
        """
        if self.failure is not None:
            raise self.failure
        line = self._request({"id": self._last_id + 1, "op": op, "budget": budget, **fields})
        self._last_id += 1
        loop = asyncio.get_running_loop()
        pending = _PendingCall(self._last_id, op, budget, loop.time(), loop.create_future())
        self._pending.append(pending)
        if len(self._pending) == 1:
            self._start_timer()
        self._send(line)
        answer = await pending.future
        if answer.fault is not None:
            raise _as_error(pending, answer.fault, loop.time() - pending.sent_at)
        return answer

    def _request(self, request: dict[str, object]) -> bytes:
        try:
            text = json.dumps(request, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        except (ValueError, RecursionError) as error:
            raise AgentFault(f"the message for '{request['op']}' is no JSON ({error})") from error
        # UTF-8 cannot encode a lone surrogate: it becomes "?".
        line = text.encode("utf-8", "replace") + b"\n"
        if len(line) > self._max_bytes:
            raise AgentFault(f"the message for '{request['op']}' has {len(line)} bytes, more than {self._max_bytes}")
        return line

    def _send(self, line: bytes) -> None:
        if not self._unsent:
            # Requests made in one iteration of the event loop are sent in one write.
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(line)

    def _flush(self) -> None:
        data, self._unsent = b"".join(self._unsent), []
        if self._transport is not None:
            self._transport.write(data)

    def _start_timer(self) -> None:
        self._stop_timer()
        # The worker serves one request at a time, so only the oldest one is timed: waiting in the queue costs no
        # budget.
        if self._pending and self._transport is not None:
            self._parts_left = PARTS
            self._schedule_timer()

    def _schedule_timer(self) -> None:
        part = (self._pending[0].budget + GRACE_SECONDS) / PARTS
        self._timer = asyncio.get_running_loop().call_later(part, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._parts_left -= 1
        if self._parts_left > 0:
            self._schedule_timer()
        elif self._has_unread_data():
            # Data that has arrived is read before the call fails: the worker must not be blamed for a slow host.
            self._timer = asyncio.get_running_loop().call_later(0, self._on_timer)
        else:
            pending = self._pending[0]
            self._fail(Deadline(pending.op, pending.budget + GRACE_SECONDS, "host"))

    def _has_unread_data(self) -> bool:
        assert self._transport is not None
        # This cannot postpone a deadline forever, because a line has at most ``max_bytes``.
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def data_received(self, data: bytes) -> None:
        """Process the stream's frames as they arrive."""
        try:
            for kind, part in self._frames.cut(data):
                if self.failure is not None:
                    return
                if kind == _STDERR:
                    self._receive_stderr(part)
                else:
                    self._receive_stdout(part)
        except ProtocolFault as fault:
            self._fail(fault)

    def _receive_stdout(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._receive_line(b"".join([*self._line, line]))
            self._line, self._line_bytes = [], 0
        self._line.append(rest)
        self._line_bytes += len(rest)
        if self._line_bytes > self._max_bytes:
            raise ProtocolFault(f"the worker wrote more than {self._max_bytes} bytes without ending the line")

    def connection_lost(self, exc: Exception | None) -> None:
        """Start the post-mortem if the stream has ended without an earlier failure."""
        self._transport = None
        self._stop_timer()
        if self.failure is None:
            self._post_mortem_task = asyncio.create_task(self._report_post_mortem(), name="sandbox post-mortem")

    async def _report_post_mortem(self) -> None:
        self._fail(await self._post_mortem(self._stderr.decode("utf-8", "backslashreplace")))

    def _receive_stderr(self, data: bytes) -> None:
        self._stderr = (self._stderr + data)[-STDERR_BYTES:]
        self._stderr_budget -= len(data)
        if self._stderr_budget < 0:
            raise ProtocolFault(f"the container wrote more than {STDERR_LIFETIME_BYTES} bytes to its stderr")

    def _receive_line(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            raise ProtocolFault(f"the worker wrote a line of {len(line)} bytes, more than {self._max_bytes}")
        answer = read_answer(line)
        if not self._pending or self._pending[0].id != answer.id:
            raise ProtocolFault(f"the worker answered request {answer.id}, which is not the oldest open one")
        pending = self._pending.popleft()
        self._start_timer()
        if not pending.future.done():
            pending.future.set_result(answer)

    def _fail(self, failure: SandboxError) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self._stop_timer()
        for pending in self._pending:
            if not pending.future.done():
                pending.future.set_exception(failure)
            # Only the oldest call exceeded its deadline; the others failed because the container is ended.
            if isinstance(failure, Deadline):
                failure = WorkerDied(None, False, str(failure))
        self._pending.clear()
        if self._transport is not None:
            self._transport.abort()
        self._on_failure()

    def close(self) -> None:
        """End the stream; pending calls raise WorkerDied."""
        if self._post_mortem_task is not None:
            self._post_mortem_task.cancel()
        self._fail(WorkerDied(None, False, "the sandbox was closed"))


class _Frames:
    """A parser of Docker's frames in chunks of any size; it buffers less than one header."""

    def __init__(self) -> None:
        self._buffer = b""
        self._stream = 0
        # Bytes of the current frame that have not arrived yet.
        self._frame_left = 0

    def cut(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (stream, bytes), stream 1 for stdout and 2 for stderr; raises ProtocolFault for any other."""
        data = self._buffer + data
        offset = 0
        while len(data) - offset >= (1 if self._frame_left else _HEADER.size):
            if not self._frame_left:
                self._stream, self._frame_left = _HEADER.unpack_from(data, offset)
                if self._stream not in (_STDOUT, _STDERR):
                    raise ProtocolFault(
                        f"the attached stream holds a frame of type {self._stream}, {self._frame_left} bytes"
                    )
                offset += _HEADER.size
                continue
            part = data[offset : offset + self._frame_left]
            offset += len(part)
            self._frame_left -= len(part)
            yield self._stream, part
        self._buffer = data[offset:]


def _as_error(pending: _PendingCall, fault: dict[str, str], elapsed: float) -> SandboxError:
    op = pending.op
    if fault["kind"] == "deadline":
        # Environment code shares the worker's process and can forge its deadline message; the host's clock decides.
        if elapsed < pending.budget * DEADLINE_TOLERANCE:
            return EnvironmentFault(op, f"it claimed to have outlived its {pending.budget:g} s after {elapsed:.3f} s")
        return Deadline(op, pending.budget, "worker")
    if fault["kind"] == "raised":
        return EnvironmentFault(op, fault["error"], fault["traceback"])
    return ProtocolFault(f"the worker refused '{op}': {clipped(fault['error'], 500)}")
