"""The daily scrub: finds what has changed, tells a person once, and holds nothing up."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.repositories.adapters import quarantined_adapters
from store.repositories.events import due_notices, list_events
from tests.unit.registry.chain import hour, seed_adapter, seed_cycle
from tests.unit.registry.tampering import WEIGHTS, flip_byte
from tests.waiting import eventually_async
from traced.daemon import scrub as scrubbing
from traced.daemon.scrub import LOWEST_PRIORITY, SCRUBBED, is_due, scrub, scrub_daily
from traced.registry.decision_rules import Action
from traced.registry.decisions import approve

V1, V2 = "error-recovery@v1", "error-recovery@v2"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    store = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(store) as session:
        seed_cycle(session)
        for number in (1, 2):
            seed_adapter(session, tmp_path, number)
    yield store
    store.dispose()


def scrubs(store: Engine) -> list[dict[str, object]]:
    with read_session(store) as session:
        return [event.detail for event in list_events(session) if event.kind == SCRUBBED]


def test_a_flipped_byte_is_found_and_reported_once(
    store: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with write_session(store) as session:
        approve(session, Action("ann", "local", hour(5)), V2)
    flip_byte(tmp_path / "adapters" / V2 / WEIGHTS)
    for number in (6, 7):
        scrub(store, ["tell"], lambda number=number: hour(number))  # type: ignore[misc]
    # The live one is read first; one in quarantine is not read.
    assert [(detail["checked"], detail["changed"]) for detail in scrubs(store)] == [(2, [V2]), (1, [])]
    with read_session(store) as session:
        assert quarantined_adapters(session).keys() == {V2}
        (notice,) = due_notices(session, ["tell"], at=hour(9), longest_wait=timedelta(hours=1))
    assert (notice.body["kind"], notice.body["subject"]) == ("adapter-quarantined", V2)
    assert [record.levelname for record in caplog.records if "is in quarantine" in record.message] == ["ERROR"]


def test_a_missing_folder_is_logged_and_not_held_against_the_version(store: Engine, tmp_path: Path) -> None:
    (tmp_path / "adapters" / V1).rename(tmp_path / "unmounted")
    scrub(store, [], lambda: hour(6))
    assert scrubs(store) == [{"checked": 2, "changed": [], "unreadable": [V1]}]
    with read_session(store) as session:
        assert quarantined_adapters(session) == {}


def test_it_is_due_a_day_after_the_last_one(store: Engine) -> None:
    assert is_due(store, hour(1))
    scrub(store, [], lambda: hour(1))
    assert [is_due(store, hour(number)) for number in (1, 24, 25)] == [False, False, True]
    assert is_due(store, hour(0))  # the clock was set back


async def test_the_event_loop_runs_on_and_the_thread_has_the_lowest_priority(
    store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, released, priorities = threading.Event(), threading.Event(), list[int]()

    def hang(*arguments: object) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        started.set()
        assert released.wait(60)

    monkeypatch.setattr(scrubbing, "scrub", hang)
    task = asyncio.create_task(scrub_daily(store, lambda: [], lambda: hour(1)))
    await eventually_async(started.is_set)
    if sys.platform == "linux":
        assert priorities == [LOWEST_PRIORITY]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()


async def test_an_error_of_the_store_is_logged_and_the_scrub_goes_on(
    store: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [ValueError("a defect")]

    def fail_once(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        scrub(store, [], lambda: hour(1))

    monkeypatch.setattr(scrubbing, "scrub", fail_once)
    monkeypatch.setattr(scrubbing, "POLL_S", 0.01)
    task = asyncio.create_task(scrub_daily(store, lambda: [], lambda: hour(1)))
    await eventually_async(lambda: len(scrubs(store)) == 1)
    assert "the adapters are not verified" in caplog.text
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
