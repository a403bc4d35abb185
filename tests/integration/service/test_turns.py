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
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from tests.unit.store.chain import T0
from traced.api.control import Control
from traced.api.errors import Crowded
from traced.api.queries import READINGS, Turns
from traced.config.settings import load_settings

LOOKING = 40  # more than the store's pool has connections


class Held:
    """Readings of capabilities that do not end until they are let go, each with its connection."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.let_go = threading.Event()

    def hold(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "FROM capabilities" in statement:
            self.begun.release()
            self.let_go.wait()

    def wait(self, count: int) -> None:
        """Until so many are held."""
        for _ in range(count):
            self.begun.acquire()


@contextmanager
def held(store: Engine) -> Iterator[Held]:
    found = Held()
    event.listen(store, "before_cursor_execute", found.hold)
    try:
        yield found
    finally:
        found.let_go.set()
        event.remove(store, "before_cursor_execute", found.hold)


async def test_slow_readings_hold_up_neither_the_work_nor_an_act_nor_a_listener(
    on_either: Engine, tmp_path: Path, path: Path
) -> None:
    def work() -> None:
        for _ in range(3):
            with write_session(on_either) as opened:
                save_event(opened, Event(T0, "work", "desk"))

    async def look() -> None:
        with held(on_either) as slow:
            async with served(control, path) as client:
                http = client._daemon._http
                asked = [asyncio.create_task(http.get("/capabilities")) for _ in range(LOOKING)]
                refused: list[httpx.Response] = []
                for one in asyncio.as_completed(asked):
                    refused.append(await one)
                    if len(refused) == LOOKING - READINGS:
                        break
                await asyncio.to_thread(slow.wait, READINGS)
                assert {one.status_code for one in refused} == {503}
                assert refused[0].headers["Retry-After"] == "5"
                assert refused[0].json() == {
                    "type": "Crowded",
                    "message": f"{READINGS} requests are read at the same time; no slot became free within 0.3 s",
                    "hint": "repeat the request in 5 s",
                }
                await asyncio.to_thread(work)
                assert not slow.begun.acquire(blocking=False)
                await client.pause("while they look")
                async with aclosing(client.listen(0)) as stream:
                    heard = [(await anext(stream)).kind for _ in range(4)]
                assert heard == ["work", "work", "work", "pause"]
                slow.let_go.set()
                answers = [one.status_code for one in await asyncio.gather(*asked)]
                assert answers.count(200) == READINGS
                assert (await client.status()).target.paused_by

    settings = load_settings(tmp_path, {"serving.port": 0})
    control = Control(settings, on_either, WrittenDown(), lambda: T0, T0, state="ready")  # type: ignore[arg-type]
    control.readings.patience_s = 0.3
    await asyncio.wait_for(look(), 25)


async def test_turns_come_in_the_order_of_asking_and_who_is_patient_waits() -> None:
    async def ask() -> list[str]:
        turns, had = Turns(1, patience_s=0.01), list[str]()
        over = asyncio.Event()

        async def take(name: str, *, patient: bool) -> None:
            async with turns.slot(patient=patient):
                had.append(name)
                await over.wait()

        taking = [asyncio.create_task(take(name, patient=name != "hasty")) for name in ("first", "second", "hasty")]
        with pytest.raises(Crowded):
            await taking[2]
        assert had == ["first"]
        over.set()
        await asyncio.gather(*taking[:2])
        async with turns.slot():  # a turn that was not taken is not lost
            return had

    assert await ask() == ["first", "second"]
