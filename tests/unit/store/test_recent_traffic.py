"""Recent traffic by model, and pages of routing decisions, with bounded reads."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories import adapters, gates, promotions, serving
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
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    yield engine
    engine.dispose()


def exchange(key: str, ago: timedelta, model: str = "base", status: int = 200, seconds: float = 0.5) -> Exchange:
    return Exchange(f"{key}-{model}-{status}-{ago}", key, NOW - ago, model, status, seconds)


def route(number: int, model: str = "base", reason: str = "") -> ConversationRoute:
    return ConversationRoute(f"c-{number:03d}", model, {"base": -0.1}, 0.01, reason, later(number))


def test_conversations_latencies_and_failures_are_counted_by_model(store: Engine) -> None:
    exchanges = [exchange("a", 2 * HOUR, seconds=0.0)]
    exchanges += [exchange(f"b{number}", 3 * HOUR + number * MINUTE, seconds=float(number)) for number in range(1, 101)]
    exchanges += [exchange("a", MINUTE, DATES, 502), exchange("a", 2 * MINUTE, DATES, 429), exchange("old", DAY + HOUR)]
    exchanges += [replace(exchange("a", MINUTE, "s@v1"), shadow_of="x")]
    with write_session(store) as session:
        serving.save_exchanges(session, exchanges)
        serving.settle_exchanges(session, {exchanges[5].id: None, exchanges[6].id: None}, at=NOW - MINUTE)
    with read_session(store) as session:
        traffic = recent_traffic(session, NOW)
    base, dates, shadow = traffic.models["base"], traffic.models[DATES], traffic.models["s@v1"]
    assert (base.hour, base.day, base.requests, base.failures) == (0, 101, 101, {})
    assert (base.latency_quantile(0.5), base.latency_quantile(0.99)) == (50.0, 99.0)
    assert (dates.hour, dates.day, dates.failures, dates.latency_quantile(0.5)) == (1, 1, {429: 1, 502: 1}, None)
    assert (shadow.hour, shadow.day, shadow.shadowed) == (0, 0, 1)
    assert not traffic.partial


def test_outcomes_and_feedback_count_for_every_model_that_answered(store: Engine) -> None:
    exchanges = [exchange("a", HOUR), exchange("b", HOUR, DATES), exchange("b", MINUTE, DATES)]
    with write_session(store) as session:
        save_cycle(session, CYCLE)
        serving.save_exchanges(session, exchanges)
        became = [trajectory("t-a", Outcome.SUCCESS, cycle_id=None), trajectory("t-b", Outcome.FAILURE, cycle_id=None)]
        save_trajectories(session, became)
        serving.settle_exchanges(
            session, {exchanges[0].id: "t-a", exchanges[1].id: "t-b", exchanges[2].id: "t-b"}, at=NOW
        )
        for key, ago in (("a", MINUTE), ("b", MINUTE), ("b", 2 * DAY), ("nobody", MINUTE)):
            serving.save_feedback(session, Feedback(key, NOW - ago, score=1.0))
    with read_session(store) as session:
        traffic = recent_traffic(session, NOW).models
    assert traffic["base"].outcomes == {Outcome.SUCCESS: 1}
    assert traffic[DATES].outcomes == {Outcome.FAILURE: 1}
    assert [len(traffic[name].feedback) for name in ("base", DATES)] == [1, 1]


def test_reads_are_bounded_by_the_limits(store: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, maximum in (("MAX_EXCHANGES", 5), ("MAX_OUTCOMES", 2), ("MAX_FEEDBACK", 3)):
        monkeypatch.setattr(module, limit, maximum)
    exchanges = [exchange(f"c{number}", number * MINUTE) for number in range(1, 20)]
    with write_session(store) as session:
        serving.save_exchanges(session, exchanges)
        save_trajectories(session, [trajectory(f"t{number}", cycle_id=None) for number in range(10)])
        serving.settle_exchanges(session, {exchanges[number].id: f"t{number}" for number in range(10)}, at=NOW)
        for number in range(1, 11):
            serving.save_feedback(session, Feedback(f"c{number}", NOW - MINUTE, score=1.0))
    statements: list[str] = []
    event.listen(store, "after_cursor_execute", lambda *exchanges: statements.append(exchanges[2]))
    with read_session(store) as session:
        traffic = recent_traffic(session, NOW)
    assert traffic.partial
    base = traffic.models["base"]
    assert (base.requests, base.outcomes, len(base.feedback)) == (5, {Outcome.FAILURE: 2}, 3)
    assert len(statements) < 10


def test_the_reasons_of_defaults_are_counted(store: Engine) -> None:
    routes = [route(number, reason="no engine answers" if number % 2 else "") for number in range(5)]
    with write_session(store) as session:
        serving.save_routes(session, [replace(item, at=NOW - HOUR) for item in routes])
        serving.save_exchanges(session, [exchange(item.id, MINUTE) for item in routes])
    with read_session(store) as session:
        assert recent_traffic(session, NOW).by_default == {"no engine answers": 2}


def test_decisions_are_paged_newest_first(store: Engine) -> None:
    with write_session(store) as session:
        serving.save_routes(session, [route(number, DATES if number % 3 == 0 else "base") for number in range(10)])
    with read_session(store) as session:
        pages, cursor = [], None
        while True:
            page = list_routes(session, limit=4, cursor=cursor)
            pages.append([item.id for item in page.decisions])
            cursor = page.next
            if cursor is None:
                break
        assert [len(page) for page in pages] == [4, 4, 2]
        assert [key for page in pages for key in page] == [f"c-{number:03d}" for number in reversed(range(10))]
        dates = list_routes(session, limit=3, model=DATES)
        assert [item.id for item in dates.decisions] == ["c-009", "c-006", "c-003"]
        last = list_routes(session, limit=3, cursor=dates.next, model=DATES)
        assert ([item.id for item in last.decisions], last.next) == (["c-000"], None)
        assert list_routes(session, limit=10).next is None


def test_decision_pages_use_an_index(store: Engine) -> None:
    with write_session(store) as session:
        serving.save_routes(session, [route(number) for number in range(3)])
    plans: list[str] = []

    def explain(connection: object, cursor: object, statement: str, parameters: object, *_: object) -> None:
        if "conversations" in statement and not statement.startswith("EXPLAIN"):
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)  # type: ignore[attr-defined]
            plans.extend(row[3] for row in plan)

    event.listen(store, "before_cursor_execute", explain)
    with read_session(store) as session:
        list_routes(session, limit=2)
        list_routes(session, limit=2, cursor="2", model="base")
    assert plans
    assert not any("TEMP B-TREE" in plan for plan in plans), plans


def test_a_rollback_restores_the_rollback_target(store: Engine) -> None:
    with write_session(store) as session:
        save_chain(session)
        for version in (2, 3):
            version_record = adapter(version)
            adapters.save_adapter(session, version_record)
            gates.save_approval(session, approval(version_record.name, seconds=20 + version))
            promotions.promote(session, version_record.name, actor="Ada", at=later(30 + version))
    left = []
    for _ in range(3):
        with write_session(store) as session:
            (live,) = [item for item in promotions.newest_promotions(session) if item.promotion.state == "live"]
            foreseen = promotions.rollback_target(session, live)
            left.append(foreseen)
            assert promotions.roll_back(session, live.promotion.adapter, actor="Ada", at=later(50)) == foreseen
    assert left == ["date-reasoning@v2", "date-reasoning@v1", None]


def test_the_exchanges_of_a_conversation_are_shown_without_their_bodies(store: Engine) -> None:
    with write_session(store) as session:
        save_chain(session)
    with read_session(store) as session:
        (without_body,) = get_conversation(session, "conv-1").exchanges
        (with_body,) = serving.list_exchanges(session, "conv-1")
    assert without_body == replace(with_body, body=None)
    assert with_body.body is not None
