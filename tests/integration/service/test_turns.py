"""However many look, and however slowly the store answers them, the work goes on."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine, event

from store.database import write_session
from store.records import Event
from store.repositories.events import save_event
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.api.errors import Crowded
from traced.api.queries import READINGS, Turns
from traced.config.settings import load_settings

READER_COUNT = 40  # more than the store's pool has connections


class BlockedReads:
    """Blocks queries of capabilities, each with its connection, until ``let_go`` is set."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.let_go = threading.Event()

    def hold(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM capabilities" in statement:
            self.started.release()
            self.let_go.wait()

    def wait(self, count: int) -> None:
        """Wait until ``count`` queries are blocked."""
        for _ in range(count):
            self.started.acquire()


@contextmanager
def block_reads(store: Engine) -> Iterator[BlockedReads]:
    blocked = BlockedReads()
    event.listen(store, "before_cursor_execute", blocked.hold)
    try:
        yield blocked
    finally:
        blocked.let_go.set()
        event.remove(store, "before_cursor_execute", blocked.hold)


async def test_slow_readings_hold_up_neither_the_work_nor_an_act_nor_a_listener(
    on_either: Engine, tmp_path: Path, path: Path
) -> None:
    def work() -> None:
        for _ in range(3):
            with write_session(on_either) as session:
                save_event(session, Event(T0, "work", "desk"))

    async def look() -> None:
        with block_reads(on_either) as slow:
            async with serve_api(control, path) as client:
                http = client._daemon._http
                tasks = [asyncio.create_task(http.get("/capabilities")) for _ in range(READER_COUNT)]
                responses: list[httpx.Response] = []
                for task in asyncio.as_completed(tasks):
                    responses.append(await task)
                    if len(responses) == READER_COUNT - READINGS:
                        break
                await asyncio.to_thread(slow.wait, READINGS)
                assert {response.status_code for response in responses} == {503}
                assert responses[0].headers["Retry-After"] == "5"
                assert responses[0].json() == {
                    "type": "Crowded",
                    "message": f"{READINGS} requests are read at the same time; no slot became free within 0.3 s",
                    "hint": "repeat the request in 5 s",
                }
                await asyncio.to_thread(work)
                assert not slow.started.acquire(blocking=False)
                await client.pause("while they look")
                async with aclosing(client.listen(0)) as stream:
                    kinds = [(await anext(stream)).kind for _ in range(4)]
                assert kinds == ["work", "work", "work", "pause"]
                slow.let_go.set()
                answers = [response.status_code for response in await asyncio.gather(*tasks)]
                assert answers.count(200) == READINGS
                assert (await client.status()).target.paused_by

    settings = load_settings(tmp_path, {"serving.port": 0})
    control = Control(settings, on_either, RecordingLoop(), lambda: T0, T0, state="ready")  # type: ignore[arg-type]
    control.readings.patience_s = 0.3
    await asyncio.wait_for(look(), 25)


async def test_turns_come_in_the_order_of_asking_and_who_is_patient_waits() -> None:
    async def ask() -> list[str]:
        turns, order = Turns(1, patience_s=0.01), list[str]()
        finished = asyncio.Event()

        async def take(name: str, *, patient: bool) -> None:
            async with turns.slot(patient=patient):
                order.append(name)
                await finished.wait()

        tasks = [asyncio.create_task(take(name, patient=name != "hasty")) for name in ("first", "second", "hasty")]
        with pytest.raises(Crowded):
            await tasks[2]
        assert order == ["first"]
        finished.set()
        await asyncio.gather(*tasks[:2])
        async with turns.slot():  # a turn that was not taken is not lost
            return order

    assert await ask() == ["first", "second"]
