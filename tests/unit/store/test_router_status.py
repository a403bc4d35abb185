"""The router part of the status: time windows, models, fallback reasons."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store import status as status
from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import NotFound
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories import serving
from store.repositories.adapters import cycles_with_adapters, save_adapter
from store.repositories.cycles import save_cycle
from store.repositories.traffic import ModelTraffic, get_conversation, model_traffic
from store.repositories.trajectories import save_trajectories
from store.status import RouterStatus, store_status
from store.types import EndCause, Outcome
from tests.unit.store.chain import CYCLE, T0, adapter, save_chain, trajectory

DATES = "dates@v1"
NOW = T0 + timedelta(days=3)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "traced.db"


@pytest.fixture
def store(file: Path) -> Iterator[Engine]:
    engine = open_store(sqlite_url(file))
    yield engine
    engine.dispose()


def exchange(key: str, ago: timedelta, *, model: str = "base", status: int = 200) -> Exchange:
    return Exchange(f"{key}-{model}-{status}-{ago}", key, NOW - ago, model, status, 0.5)


def read_status(file: Path) -> RouterStatus:
    return store_status(sqlite_url(file), NOW).router


def test_a_store_without_a_router_has_an_empty_status(store: Engine, file: Path) -> None:
    with write_session(store) as session:
        save_cycle(session, CYCLE)
    assert read_status(file) == RouterStatus()
    assert not read_status(file).used


def test_conversations_count_by_model_and_failures_by_status(store: Engine, file: Path) -> None:
    minutes = timedelta(minutes=30)
    engine = [exchange("a", minutes), exchange("a", HOUR * 2), exchange("b", HOUR * 23, model=DATES)]
    engine += [exchange("b", minutes, status=502), exchange("b", HOUR * 3, status=502), exchange("c", HOUR, status=429)]
    old = [exchange("d", DAY + HOUR), exchange("e", DAY * 2, status=500), exchange("f", DAY * 2)]
    with write_session(store) as session:
        serving.save_exchanges(session, [*engine, *old])
        settled_ids = dict.fromkeys([engine[1].id, engine[2].id, old[0].id, old[1].id])
        serving.settle_exchanges(session, settled_ids, at=NOW - minutes)
    status_read = read_status(file)
    assert status_read.hour == {"base": 2}
    assert status_read.day == {"base": 3, DATES: 1}
    assert status_read.failures == {429: 1, 502: 2}
    assert (status_read.unsettled, status_read.partial, status_read.used) == (5, False, True)


def test_fallback_reasons_are_counted_by_conversation(store: Engine, file: Path) -> None:
    late = "no decision within 2 s"
    reasons = {"a": late, "b": late, "c": "no engine answers", "d": "", "e": "old"}
    with write_session(store) as session:
        routes = [ConversationRoute(key, "base", {}, 2.0, reason, NOW - HOUR) for key, reason in reasons.items()]
        serving.save_routes(session, [*routes[:4], replace(routes[4], at=NOW - DAY * 2)])
        serving.save_exchanges(session, [exchange(key, HOUR * n) for key in reasons for n in (1, 2)])
    assert read_status(file).by_default == {late: 2, "no engine answers": 1}


def test_feedback_and_outcomes(store: Engine, file: Path) -> None:
    feedback = [Feedback("a", NOW - HOUR, score=score) for score in (0.0, 0.5, 0.9)]
    feedback += [Feedback("a", NOW, label="thumbs_up"), Feedback("a", NOW, comment="so so")]
    with write_session(store) as session:
        save_cycle(session, CYCLE)
        for item in [*feedback, Feedback("a", NOW - DAY * 2, score=1.0)]:
            serving.save_feedback(session, item)
        kinds = {"s1": Outcome.SUCCESS, "s2": Outcome.SUCCESS, "u": Outcome.UNKNOWN}
        save_trajectories(session, [trajectory(key, kind, cycle_id=None) for key, kind in kinds.items()])
        save_trajectories(session, [trajectory("own"), trajectory("other", cycle_id=None, source="elsewhere")])
    status_read = read_status(file)
    assert status_read.feedback == {"comment": 1, "label thumbs_up": 1, "score 0.5 or more": 2, "score below 0.5": 1}
    assert not status_read.is_feedback_partial
    assert status_read.outcomes == {"failure": 1, "success": 2, "unknown": 1}
    assert status_read.by_target == {"desk": {"success": 2, "unknown": 1}, "elsewhere": {"failure": 1}}


def test_production_is_counted_without_reading_all_of_it(store: Engine) -> None:
    with store.connect() as connection:
        plan = str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {status.OUTCOMES_SQL}").all())
    assert "(source>?)" in plan
    assert "(cycle_id=?)" not in plan


def test_imported_trajectories_are_no_production(store: Engine, file: Path) -> None:
    imported = replace(trajectory("t1"), cycle_id=None, source="tau-bench", outcome=Outcome.SUCCESS)
    produced = replace(imported, id="t2", source="desk")
    cycle = replace(CYCLE, id="tau-bench-1", target="tau-bench", config={"imported": 1})
    with write_session(store) as session:
        for item in (CYCLE, cycle):
            save_cycle(session, item)
        save_trajectories(session, [imported, produced])
    assert read_status(file).outcomes == {"success": 1}


def test_reads_are_bounded_and_marked_partial(store: Engine, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "MAX_EXCHANGES", 3)
    monkeypatch.setattr(status, "MAX_FEEDBACK", 2)
    with write_session(store) as session:
        serving.save_exchanges(session, [exchange(f"c{n}", timedelta(minutes=n), model=f"m{n}@v1") for n in range(9)])
        for score in (0.0, 0.7, 0.9):
            serving.save_feedback(session, Feedback("a", NOW, score=score))
    status_read = read_status(file)
    assert (set(status_read.day), status_read.partial) == ({"m0@v1", "m1@v1", "m2@v1"}, True)
    assert (status_read.feedback, status_read.is_feedback_partial) == ({"score 0.5 or more": 2}, True)


def test_fitting_cycles_equal_those_of_the_repository(store: Engine, file: Path) -> None:
    with write_session(store) as session:
        save_chain(session)
        save_cycle(session, replace(CYCLE, id="c2"))
        engine = replace(adapter(2), cycle_id="c2", created_at=T0 + HOUR)
        save_adapter(session, engine)
        save_adapter(session, replace(adapter(3), created_at=T0))
    with read_session(store) as session:
        assert store_status(sqlite_url(file), NOW).fitting == cycles_with_adapters(session) == ["c2", "c1"]


def test_a_conversation_by_its_id_or_a_response_id(store: Engine) -> None:
    with write_session(store) as session:
        save_chain(session)
        serving.save_exchanges(session, [replace(exchange("named", HOUR), response_id="r-1")])
        conversation = get_conversation(session, "conv-1")
        assert conversation.route is not None
        assert [(exchange.id, exchange.body) for exchange in conversation.exchanges] == [("exchange-1", None)]
        assert [exchange.comment for exchange in conversation.feedback] == ["so so"]
        assert conversation.trajectories == []
        record = trajectory("router-1", cycle_id=None, turns=[])
        save_trajectories(session, [record])
        serving.settle_exchanges(session, {"exchange-1": "router-1"}, at=NOW)
        assert get_conversation(session, "conv-1").trajectories == [record]
        by_answer = get_conversation(session, "r-1")
        assert (by_answer.id, by_answer.route) == ("named", None)
        with pytest.raises(NotFound, match=r"no conversation 'conv-2' .*X-Traced-Conversation"):
            get_conversation(session, "conv-2")


def test_traffic_and_outcomes_of_an_adapter(store: Engine) -> None:
    with write_session(store) as session:
        assert model_traffic(session, DATES) == ModelTraffic(0, 0, None, {})
        assert model_traffic(session, DATES).share is None
        models = {"a": DATES, "b": "base", "c": DATES, "d": "tools@v1"}
        routes = [
            ConversationRoute(key, model, {}, 0.1, "", NOW - HOUR * n) for n, (key, model) in enumerate(models.items())
        ]
        serving.save_routes(session, routes)
        kinds = {"r1": Outcome.SUCCESS, "r2": Outcome.FAILURE, "r3": Outcome.SUCCESS, "r4": Outcome.UNKNOWN}
        trajectories = [trajectory(key, kind, cycle_id=None, model=DATES) for key, kind in kinds.items()]
        shadow = replace(trajectory("r6", Outcome.SUCCESS, cycle_id=None, model=DATES), end_cause=EndCause.SHADOW)
        save_trajectories(session, [*trajectories, trajectory("r5", cycle_id=None), shadow])
    with read_session(store) as session:
        model_figures = model_traffic(session, DATES)
    assert (model_figures.conversations, model_figures.decided, model_figures.share, model_figures.last) == (
        2,
        4,
        0.5,
        NOW,
    )
    assert model_figures.outcomes == {Outcome.FAILURE: 1, Outcome.SUCCESS: 2, Outcome.UNKNOWN: 1}
