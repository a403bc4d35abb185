"""The channel against a scripted container end, framed as Docker frames an attached stream."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from sandbox import channel as channel_module
from sandbox.channel import Channel
from sandbox.errors import AgentFault, Deadline, EnvironmentFault, ProtocolFault, SandboxError, WorkerDied

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
Use = Callable[[Channel], Awaitable[Any]]
PostMortem = Callable[[str], Awaitable[SandboxError]]


def frame(data: bytes, kind: int = 1) -> bytes:
    return struct.pack(">BxxxL", kind, len(data)) + data


def answer(request: dict[str, Any], **value: Any) -> bytes:
    return json.dumps({"id": request["id"], "seconds": 0, "ok": value}).encode() + b"\n"


async def out_of_memory(stderr: str) -> SandboxError:
    return WorkerDied(137, True, stderr)


def nothing() -> None:
    pass


def talk(
    script: Script, use: Use, max_bytes: int = 4096, post_mortem: PostMortem = out_of_memory
) -> tuple[Any, list[str]]:
    """Run ``use`` on a channel whose other end is ``script``; return its result or error, and the recorded ends."""
    ends: list[str] = []
    unhandled: list[dict[str, Any]] = []

    def on_failure() -> None:
        ends.append("ended")

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
        host_socket, worker_socket = socket.socketpair()
        channel = Channel(max_bytes=max_bytes, post_mortem=post_mortem, on_failure=on_failure)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=host_socket)
        their_reader, their_writer = await asyncio.open_connection(sock=worker_socket)
        other = asyncio.create_task(script(their_reader, their_writer))
        try:
            return await use(channel)
        except SandboxError as error:
            return error
        finally:
            channel.close()
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            their_writer.close()

    with asyncio.Runner(loop_factory=DelayedEventLoop) as runner:
        result = runner.run(main())
    assert unhandled == []
    return result, ends


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        request = json.loads(line)
        data = answer(request, said=request.get("word"))
        writer.write(frame(data[:5]) + frame(b"noise", kind=2) + frame(data[5:]))  # a line may be cut anywhere


def speak(data: bytes, *, close: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(data)
        if close:
            writer.close()

    return script


async def single_call(channel: Channel) -> Any:
    return await channel.call("step", 5.0, word="w")


def test_many_calls_in_flight_get_their_own_answers() -> None:
    async def use(channel: Channel) -> list[Any]:
        return await asyncio.gather(*(channel.call("say", 5.0, word=number) for number in range(100)))

    answers, _ = talk(echo, use)
    assert [answer_read.value["said"] for answer_read in answers] == list(range(100))


def test_a_cancelled_call_leaves_the_others_their_answers() -> None:
    async def use(channel: Channel) -> Any:
        cancelled_call = asyncio.ensure_future(channel.call("say", 5.0, word="lost"))
        await asyncio.sleep(0)
        cancelled_call.cancel()
        return await channel.call("say", 5.0, word="kept")

    result, _ = talk(echo, use)
    assert result.value == {"said": "kept"}


@pytest.mark.parametrize(
    "data",
    [
        frame(b'{"id": 7, "ok": {}}\n'),
        frame(b"hello\n"),
        frame(b'{"id": 1, "ok": {"x": NaN}}\n'),
        frame(b'{"id": 1, "ok": {"x": ' + b"[" * 80 + b"]" * 80 + b"}}\n"),
        frame(b'{"id": 1, "fault": {"kind": ["raised"]}}\n'),
        frame(b"\xff\xfe\n"),
        frame(b"x" * 5000),
        frame(b'{"id": 1, "ok": {"x": "' + b"x" * 5000 + b'"}}\n'),
        frame(b"x" * 3000) + frame(b"x" * 3000 + b"\n"),
        frame(b'{"id": 1, "ok": {}}\n{"id": 2, "ok": {}}\n'),
        struct.pack(">BxxxL", 9, 1) + b"x",
    ],
    ids=[
        "foreign id",
        "text",
        "nan",
        "deep",
        "fault of lists",
        "bytes",
        "no newline",
        "long answer",
        "long line",
        "unasked second answer",
        "frame type",
    ],
)
def test_a_protocol_violation_ends_the_container_once(data: bytes) -> None:
    async def use(channel: Channel) -> Any:
        await asyncio.gather(single_call(channel), return_exceptions=True)
        return await single_call(channel)  # later calls meet the same failure

    result, ends = talk(speak(data), use)
    assert isinstance(result, ProtocolFault)
    assert ends == ["ended"]


def test_the_end_of_the_stream_is_judged_by_the_engine_and_keeps_the_last_words() -> None:
    result, ends = talk(speak(frame(b"Fatal Python error", kind=2), close=True), single_call)
    assert isinstance(result, WorkerDied)
    assert result.oom
    assert "Fatal Python error" in str(result)
    assert ends == ["ended"]


def test_the_last_words_cannot_steer_a_terminal() -> None:
    words = b"\x1b[2J\x1b]0;owned\x07\x9b31m\xff \xe2\x80\xaetxt\r\x08 \xc3\xa9\n"
    result, _ = talk(speak(frame(words, kind=2), close=True), single_call)
    assert str(result).endswith(r"\x1b[2J\x1b]0;owned\x07\x9b31m\xff \u202etxt\r\x08 é" + "\n")


def test_a_flood_of_stderr_ends_the_container() -> None:
    result, ends = talk(speak(frame(b"x" * 65536, kind=2) * 17), single_call)
    assert isinstance(result, ProtocolFault)
    assert "stderr" in str(result)
    assert ends == ["ended"]


def test_stderr_is_bounded() -> None:
    result, _ = talk(speak(frame(b"a" * 100_000, kind=2) + frame(b"b" * 4096, kind=2), close=True), single_call)
    assert "aa" not in str(result)


def test_silence_meets_the_hosts_deadline_and_the_others_die_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GRACE_SECONDS", 0.01)

    async def use(channel: Channel) -> list[Any]:
        calls = (channel.call("step", 0.01), channel.call("reset", 100.0))
        return list(await asyncio.gather(*calls, return_exceptions=True))

    (first, second), ends = talk(speak(b""), use)
    assert isinstance(first, Deadline)
    assert first.stopped_by == "host"
    assert isinstance(second, WorkerDied)
    assert ends == ["ended"]


class DelayedEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can jump, as after a task that blocked it."""

    leapt = 0.0

    def time(self) -> float:
        return super().time() + self.leapt


def hold_up(seconds: float = 10_000) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, DelayedEventLoop)
    loop.leapt += seconds


@pytest.mark.parametrize("size", [1, 300_000], ids=["read at once", "read in pieces"])
def test_an_answer_that_waits_when_the_alarm_rings_is_in_time(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The loop reads no more than 256 KiB in one turn."""
    monkeypatch.setattr(channel_module, "PARTS", 1)

    async def main() -> Any:
        host_socket, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setblocking(False)
        channel = Channel(max_bytes=1 << 20, post_mortem=out_of_memory, on_failure=nothing)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=host_socket)
        with theirs:
            call = asyncio.ensure_future(channel.call("step", 60.0))
            await asyncio.sleep(0)  # the alarm is set; the loop looks at neither it nor the socket before this is over
            data = frame(answer({"id": 1}, said="x" * size))
            assert theirs.send(data) == len(data)
            hold_up()
            await asyncio.wait([call])
            channel.close()
        return call.result().value

    with asyncio.Runner(loop_factory=DelayedEventLoop) as runner:
        assert runner.run(main()) == {"said": "x" * size}


def test_a_delayed_host_does_not_shorten_the_deadline() -> None:
    async def use(channel: Channel) -> Any:
        call = asyncio.ensure_future(channel.call("say", 600.0, word="w"))
        await asyncio.sleep(0)  # the alarm is set, and the request has not left
        hold_up()
        return (await call).value

    assert talk(echo, use) == ({"said": "w"}, ["ended"])


async def pass_by(seconds: float, times: int) -> None:
    """Run a number of turns of the event loop, each with the given delay."""
    for _ in range(times):
        hold_up(seconds)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def slow(seconds: float, times: int) -> Script:
    """Answer every request after a delay."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            await pass_by(seconds, times)
            writer.write(frame(answer(json.loads(line))))

    return script


def test_the_host_waits_beyond_the_workers_own_deadline() -> None:
    parts, budget = channel_module.PARTS, 8.0
    late = (budget + channel_module.GRACE_SECONDS / 2) / parts

    async def use(channel: Channel) -> Any:
        return (await channel.call("step", budget)).value

    assert talk(slow(late, parts), use) == ({}, ["ended"])
    result, _ = talk(slow(late * 2, parts), use)
    assert isinstance(result, Deadline)
    assert result.stopped_by == "host"


def test_waiting_behind_others_costs_no_call_its_time() -> None:
    async def use(channel: Channel) -> Any:
        return [
            call_number.value for call_number in await asyncio.gather(*(channel.call("step", 5.0) for _ in range(4)))
        ]

    assert talk(slow(1000, channel_module.PARTS - 2), use) == ([{}] * 4, ["ended"])


def test_a_slow_post_mortem_still_reports_the_death() -> None:
    async def post_mortem(stderr: str) -> SandboxError:
        for _ in range(3 * channel_module.PARTS):
            hold_up()
            await asyncio.sleep(0)
        return WorkerDied(137, True, stderr)

    result, ends = talk(speak(b"", close=True), single_call, post_mortem=post_mortem)
    assert isinstance(result, WorkerDied)
    assert result.oom
    assert ends == ["ended"]


def test_dripping_bytes_delay_the_deadline_for_one_line_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "GRACE_SECONDS", 0.01)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(frame(b" "))
            await asyncio.sleep(0)

    async def use(channel: Channel) -> Any:
        return await channel.call("step", 0.01)

    result, ends = talk(drip, use, max_bytes=1 << 16)
    assert isinstance(result, Deadline | ProtocolFault)
    assert ends == ["ended"]


@pytest.mark.parametrize(
    ("kind", "budget", "error"),
    [
        ("raised", 5.0, EnvironmentFault),
        ("deadline", 1e-9, Deadline),
        ("deadline", 5.0, EnvironmentFault),  # claimed before it was over
        ("request", 5.0, ProtocolFault),
        ("dance", 5.0, ProtocolFault),
    ],
)
def test_faults_of_one_call_leave_the_channel_open(kind: str, budget: float, error: type[SandboxError]) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = json.loads(await reader.readline())
        fault = {"kind": kind, "error": "E: x", "traceback": "t"}
        writer.write(frame(json.dumps({"id": request["id"], "fault": fault}).encode() + b"\n"))
        await echo(reader, writer)

    async def use(channel: Channel) -> Any:
        with pytest.raises(error):
            await channel.call("step", budget)
        return await single_call(channel)

    result, _ = talk(script, use)
    assert result.value == {"said": "w"}


def test_a_message_too_long_for_the_worker_is_never_sent() -> None:
    async def use(channel: Channel) -> Any:
        return await channel.call("step", 5.0, message="x" * 5000)

    result, ends = talk(echo, use)
    assert isinstance(result, AgentFault)
    assert ends == ["ended"]  # by closing alone


@pytest.mark.parametrize("content", [float("nan"), float("inf"), []], ids=["nan", "inf", "endless"])
def test_a_message_that_is_no_json_is_the_agents_fault_alone(content: Any) -> None:
    if content == []:
        content.append(content)

    async def use(channel: Channel) -> Any:
        with pytest.raises(AgentFault):
            await channel.call("step", 5.0, message={"content": content})
        return await single_call(channel)

    result, _ = talk(echo, use)
    assert result.value == {"said": "w"}


def test_half_a_character_from_the_agent_arrives_as_a_question_mark() -> None:
    async def use(channel: Channel) -> Any:
        return await channel.call("say", 5.0, word="a\ud800\u2603")

    result, _ = talk(echo, use)
    assert result.value == {"said": "a?\u2603"}


def test_seconds_that_are_no_seconds_read_as_none() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(frame(b'{"id": 1, "seconds": 1' + b"0" * 400 + b', "ok": {}}\n'))

    result, _ = talk(script, single_call)
    assert result.seconds == 0.0
