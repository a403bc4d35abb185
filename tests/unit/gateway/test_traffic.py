"""What listeners hear of the router's traffic: soon, not often, and nothing that stays."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import StoreUnavailable
from store.records import Event, Feedback
from store.repositories.events import list_events, save_event
from store.repositories.serving import save_feedback
from tests.unit.ingest.test_spool import line
from tests.unit.store.chain import T0
from traced.config.settings import load_settings
from traced.gateway.recorder import EVENT_INTERVAL_S, EVENT_RETENTION, MAX_MODELS, TRAFFIC, Recorder, TrafficEvents


class Clock:
    """A clock that is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    session = open_store(sqlite_url(tmp_path / "traced.db"))
    yield session
    session.dispose()


def traffic_details(store: Engine) -> list[dict[str, object]]:
    with read_session(store) as session:
        return [event.detail for event in list_events(session) if event.kind == TRAFFIC]


def test_one_event_summarizes_its_interval(store: Engine) -> None:
    clock = Clock()
    traffic = TrafficEvents(clock=clock)
    traffic.emit(store, T0)
    assert traffic_details(store) == []  # nothing happened
    traffic.exchanges.update(["base", "base", "dates@v1"])
    traffic.emit(store, T0)
    assert traffic_details(store) == []  # too soon after the last look
    clock.now += EVENT_INTERVAL_S
    traffic.settled_conversations = 2
    traffic.emit(store, T0)
    assert traffic_details(store) == [{"exchanges": {"base": 2, "dates@v1": 1}, "settled": 2}]
    with write_session(store) as session:
        save_feedback(session, Feedback("c", T0, score=1.0))
    clock.now += EVENT_INTERVAL_S / 2
    traffic.emit(store, T0)
    clock.now += EVENT_INTERVAL_S / 2
    traffic.emit(store, T0)
    assert traffic_details(store)[1:] == [{"feedback": 1}]


def test_only_the_most_frequent_models_are_named(store: Engine) -> None:
    traffic = TrafficEvents()
    traffic.exchanges.update({f"m{number}": number + 1 for number in range(MAX_MODELS + 3)})
    traffic.emit(store, T0)
    (detail,) = traffic_details(store)
    exchanges = detail["exchanges"]
    assert isinstance(exchanges, dict)
    assert len(exchanges) == MAX_MODELS + 1
    assert exchanges["others"] == 1 + 2 + 3


def test_a_busy_router_does_not_fill_the_store(store: Engine) -> None:
    clock = Clock()
    traffic = TrafficEvents(clock=clock)
    with write_session(store) as session:
        save_event(session, Event(T0, "approve", "dates@v1"))
    steps = 3 * EVENT_RETENTION // timedelta(minutes=10)
    for step in range(steps):
        traffic.exchanges["base"] += 1
        clock.now += EVENT_INTERVAL_S
        traffic.emit(store, T0 + step * timedelta(minutes=10))
    assert len(traffic_details(store)) == EVENT_RETENTION // timedelta(minutes=10) + 1
    with read_session(store) as session:
        assert list_events(session)[0].kind == "approve"


def test_traffic_is_reported_after_the_store_is_available_again(store: Engine, tmp_path: Path) -> None:
    traffic = TrafficEvents()
    traffic.exchanges["base"] += 1
    with write_session(store) as session:
        session.connection().exec_driver_sql("ALTER TABLE events RENAME TO away")
    with pytest.raises(StoreUnavailable):
        traffic.emit(store, T0)
    with write_session(store) as session:
        session.connection().exec_driver_sql("ALTER TABLE away RENAME TO events")
    traffic.emit(store, T0)
    assert traffic_details(store) == [{"exchanges": {"base": 1}}]


def test_the_recorder_emits_traffic(store: Engine, tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    storer = Recorder(load_settings(tmp_path), store)
    storer.run_once()
    (tmp_path / "spool" / "exchanges-1-1.jsonl").write_bytes(line("exchange-1") + line("told-2"))
    storer.stopped.set()
    storer.run()  # what came last is told at the end
    (detail,) = traffic_details(store)
    assert detail == {"exchanges": {"base": 2}, "settled": 1}
