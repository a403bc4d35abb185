"""What the router did of late by model, and its decisions page by page, however many there are."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories import adapters, promotions, serving
from store.repositories import traffic as module
from store.repositories.cycles import save_cycle
from store.repositories.traffic import get_conversation, list_routes, recent_traffic
from store.repositories.trajectories import save_trajectories
from store.types import Outcome
from tests.unit.store.chain import CYCLE, T0, adapter, approval, later, save_chain, trajectory

NOW = T0 + timedelta(days=3)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
DATES = "dates@v1"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Engine]:
    made = open_store(sqlite_url(tmp_path / "traced.db"))
    yield made
    made.dispose()


def exchange(key: str, ago: timedelta, model: str = "base", status: int = 200, seconds: float = 0.5) -> Exchange:
    return Exchange(f"{key}-{model}-{status}-{ago}", key, NOW - ago, model, status, seconds)


def route(number: int, model: str = "base", why: str = "") -> ConversationRoute:
    return ConversationRoute(f"c-{number:03d}", model, {"base": -0.1}, 0.01, why, later(number))


def test_conversations_seconds_and_failures_are_the_models_own(store: Engine) -> None:
    told = [exchange("a", 2 * HOUR, seconds=0.0)]
    told += [exchange(f"b{number}", 3 * HOUR + number * MINUTE, seconds=float(number)) for number in range(1, 101)]
    told += [exchange("a", MINUTE, DATES, 502), exchange("a", 2 * MINUTE, DATES, 429), exchange("old", DAY + HOUR)]
    told += [replace(exchange("a", MINUTE, "s@v1"), shadow_of="x")]
    with write_session(store) as opened:
        serving.save_exchanges(opened, told)
        serving.settle_exchanges(opened, {told[5].id: None, told[6].id: None}, at=NOW - MINUTE)
    with read_session(store) as opened:
        found = recent_traffic(opened, NOW)
    base, dates, shadow = found.models["base"], found.models[DATES], found.models["s@v1"]
    assert (base.hour, base.day, base.requests, base.failures) == (0, 101, 101, {})
    assert (base.latency_quantile(0.5), base.latency_quantile(0.99)) == (50.0, 99.0)
    assert (dates.hour, dates.day, dates.failures, dates.latency_quantile(0.5)) == (1, 1, {429: 1, 502: 1}, None)
    assert (shadow.hour, shadow.day, shadow.shadowed) == (0, 0, 1)
    assert not found.partial


def test_outcomes_and_feedback_are_of_conversations_that_a_model_answered_in(store: Engine) -> None:
    told = [exchange("a", HOUR), exchange("b", HOUR, DATES), exchange("b", MINUTE, DATES)]
    with write_session(store) as opened:
        save_cycle(opened, CYCLE)
        serving.save_exchanges(opened, told)
        became = [trajectory("t-a", Outcome.SUCCESS, cycle_id=None), trajectory("t-b", Outcome.FAILURE, cycle_id=None)]
        save_trajectories(opened, became)
        serving.settle_exchanges(opened, {told[0].id: "t-a", told[1].id: "t-b", told[2].id: "t-b"}, at=NOW)
        for key, ago in (("a", MINUTE), ("b", MINUTE), ("b", 2 * DAY), ("nobody", MINUTE)):
            serving.save_feedback(opened, Feedback(key, NOW - ago, score=1.0))
    with read_session(store) as opened:
        found = recent_traffic(opened, NOW).models
    assert found["base"].outcomes == {Outcome.SUCCESS: 1}
    assert found[DATES].outcomes == {Outcome.FAILURE: 1}
    assert [len(found[name].feedback) for name in ("base", DATES)] == [1, 1]


def test_no_more_is_read_than_the_limits_say(store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in (("MAX_EXCHANGES", 5), ("MAX_OUTCOMES", 2), ("MAX_FEEDBACK", 3)):
        monkeypatch.setattr(module, limit, most)
    told = [exchange(f"c{number}", number * MINUTE) for number in range(1, 20)]
    with write_session(store) as opened:
        serving.save_exchanges(opened, told)
        save_trajectories(opened, [trajectory(f"t{number}", cycle_id=None) for number in range(10)])
        serving.settle_exchanges(opened, {told[number].id: f"t{number}" for number in range(10)}, at=NOW)
        for number in range(1, 11):
            serving.save_feedback(opened, Feedback(f"c{number}", NOW - MINUTE, score=1.0))
    read: list[str] = []
    event.listen(store, "after_cursor_execute", lambda *told: read.append(told[2]))
    with read_session(store) as opened:
        found = recent_traffic(opened, NOW)
    assert found.partial
    base = found.models["base"]
    assert (base.requests, base.outcomes, len(base.feedback)) == (5, {Outcome.FAILURE: 2}, 3)
    assert len(read) < 10


def test_the_reasons_of_defaults_are_counted(store: Engine) -> None:
    routes = [route(number, why="no engine answers" if number % 2 else "") for number in range(5)]
    with write_session(store) as opened:
        serving.save_routes(opened, [replace(one, at=NOW - HOUR) for one in routes])
        serving.save_exchanges(opened, [exchange(one.id, MINUTE) for one in routes])
    with read_session(store) as opened:
        assert recent_traffic(opened, NOW).by_default == {"no engine answers": 2}


def test_decisions_come_page_by_page_newest_first(store: Engine) -> None:
    with write_session(store) as opened:
        serving.save_routes(opened, [route(number, DATES if number % 3 == 0 else "base") for number in range(10)])
    with read_session(store) as opened:
        pages, before = [], None
        while True:
            page = list_routes(opened, limit=4, cursor=before)
            pages.append([one.id for one in page.decisions])
            before = page.next
            if before is None:
                break
        assert [len(page) for page in pages] == [4, 4, 2]
        assert [key for page in pages for key in page] == [f"c-{number:03d}" for number in reversed(range(10))]
        dates = list_routes(opened, limit=3, model=DATES)
        assert [one.id for one in dates.decisions] == ["c-009", "c-006", "c-003"]
        last = list_routes(opened, limit=3, cursor=dates.next, model=DATES)
        assert ([one.id for one in last.decisions], last.next) == (["c-000"], None)
        assert list_routes(opened, limit=10).next is None


def test_decisions_are_read_by_an_index(store: Engine) -> None:
    with write_session(store) as opened:
        serving.save_routes(opened, [route(number) for number in range(3)])
    plans: list[str] = []

    def explain(connection: object, cursor: object, statement: str, parameters: object, *_: object) -> None:
        if "conversations" in statement and not statement.startswith("EXPLAIN"):
            told = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[attr-defined]
            plans.extend(row[3] for row in told)

    event.listen(store, "before_cursor_execute", explain)
    with read_session(store) as opened:
        list_routes(opened, limit=2)
        list_routes(opened, limit=2, cursor="2", model="base")
    assert plans
    assert not any("TEMP B-TREE" in plan for plan in plans), plans


def test_what_a_rollback_would_leave_is_what_it_leaves(store: Engine) -> None:
    with write_session(store) as opened:
        save_chain(opened)
        for version in (2, 3):
            made = adapter(version)
            adapters.save_adapter(opened, made)
            promotions.save_approval(opened, approval(made.name, seconds=20 + version))
            promotions.promote(opened, made.name, actor="Ada", at=later(30 + version))
    left = []
    for _ in range(3):
        with write_session(store) as opened:
            (live,) = [one for one in promotions.newest_promotions(opened) if one.promotion.state == "live"]
            foreseen = promotions.rollback_target(opened, live)
            left.append(foreseen)
            assert promotions.roll_back(opened, live.promotion.adapter, actor="Ada", at=later(50)) == foreseen
    assert left == ["date-reasoning@v2", "date-reasoning@v1", None]


def test_the_exchanges_of_a_conversation_are_shown_without_their_bodies(store: Engine) -> None:
    with write_session(store) as opened:
        save_chain(opened)
    with read_session(store) as opened:
        (shown,) = get_conversation(opened, "conv-1").exchanges
        (whole,) = serving.list_exchanges(opened, "conv-1")
    assert shown == replace(whole, body=None)
    assert whole.body is not None
