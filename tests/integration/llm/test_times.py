"""The times that are shipped (``[llm]`` as it is), on a loop whose clock the test moves on: nobody waits a minute."""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agents.errors import ModelUnavailable
from agents.llm.model import Model
from agents.llm.question import InMemoryLedger
from agents.llm.transport import Transport
from tests.integration.llm.llm_client import ANSWER, GOOD, Fault, question
from tests.scripted_model import ScriptedReply, Silence, scripted_server
from traced.config.cycle_sections import LlmSection
from traced.llm.connection import endpoint

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PIECE = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "one "}}]}\n\n'


class Ahead(asyncio.SelectorEventLoop):
    """Its clock is the machine's, and as far ahead as the test says."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


class Shipped:
    """A model with the times of the settings as they are; ``gave_up`` is how far ahead each failed try ended."""

    def __init__(self, url: str, **changes: Any) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Ahead)
        self.loop, self.gave_up = loop, list[float]()
        source = endpoint(LlmSection(model="scripted", base_url=url, **changes))
        self.model = Model(
            source, InMemoryLedger(), transport=Transport(source, sleep=self._pause, rng=random.Random(7))
        )

    async def _pause(self, seconds: float) -> None:
        self.gave_up.append(self.loop.ahead)


def run(action: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=Ahead) as runner:
        runner.run(action())


async def until_settled() -> None:
    """Whatever can go on has gone on: an answer's pieces are read, and the next is waited for."""
    for _ in range(20):
        await asyncio.sleep(0.001)


def test_a_minute_of_silence_is_waited_out() -> None:
    request_count, going_on = threading.Event(), threading.Event()

    def script(body: dict[str, Any], nth: int) -> ScriptedReply:
        request_count.set()
        going_on.wait(60)
        return GOOD

    async def story() -> None:
        shipped = Shipped(server.url)
        async with shipped.model:
            task = asyncio.create_task(shipped.model.ask(question(), Fault))
            await asyncio.to_thread(request_count.wait, 60)
            await until_settled()
            shipped.loop.ahead += 60
            await until_settled()
            assert not task.done()
            going_on.set()
            assert await task == ANSWER

    with scripted_server(script) as server:
        run(story)
        assert len(server.requests) == 1


@pytest.mark.parametrize("midway", [False, True])
def test_two_minutes_of_silence_end_a_try_and_the_next_one_is_answered(
    midway: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agents.llm")

    async def story() -> None:
        shipped = Shipped(server.url)
        async with shipped.model:
            task = asyncio.create_task(shipped.model.ask(question(), Fault))
            while not server.requests:
                await until_settled()
            while not task.done():
                await until_settled()
                shipped.loop.ahead += 0 if shipped.gave_up else 20
        assert task.result() == ANSWER
        [ahead] = shipped.gave_up
        assert 120 <= ahead < 600  # the whole answer's time is another

    with scripted_server(lambda body, nth: GOOD if nth else Silence(3600, GOOD, midway)) as server:
        run(story)
        assert len(server.requests) == 2
    assert "no data for 120 s" in caplog.text


def test_an_answer_that_trickles_for_ten_minutes_is_given_up() -> None:
    """A piece a minute: it is never silent for long."""

    async def trickling(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        while not writer.is_closing():
            writer.write(PIECE)
            await asyncio.sleep(60)

    async def story() -> None:
        server = await asyncio.start_server(trickling, "127.0.0.1", 0)
        shipped = Shipped(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", patience_s=1e-6)
        async with server, shipped.model:
            task = asyncio.create_task(shipped.model.ask(question(), Fault))
            await until_settled()
            while not task.done():
                assert shipped.loop.ahead < 700
                shipped.loop.ahead += 20
                await until_settled()
            with pytest.raises(ModelUnavailable, match=r"no complete answer in 600 s \(llm.timeout_s\)"):
                await task
        assert shipped.loop.ahead >= 600

    run(story)
