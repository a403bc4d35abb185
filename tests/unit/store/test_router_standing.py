"""What the router does of late, as a quick look tells it: the right day, the right model, the right reasons."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine

from store import status as router_standing
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
    made = open_store(sqlite_url(file))
    yield made
    made.dispose()


def exchange(key: str, ago: timedelta, *, model: str = "base", status: int = 200) -> Exchange:
    return Exchange(f"{key}-{model}-{status}-{ago}", key, NOW - ago, model, status, 0.5)


def told(file: Path) -> RouterStatus:
    return store_status(sqlite_url(file), NOW).router


def test_a_store_without_a_router_tells_nothing(store: Engine, file: Path) -> None:
    with write_session(store) as opened:
        save_cycle(opened, CYCLE)
    assert told(file) == RouterStatus()
    assert not told(file).used


def test_conversations_count_by_the_model_that_answered_and_requests_by_how_they_failed(
    store: Engine, file: Path
) -> None:
    minutes = timedelta(minutes=30)
    made = [exchange("a", minutes), exchange("a", HOUR * 2), exchange("b", HOUR * 23, model=DATES)]
    made += [exchange("b", minutes, status=502), exchange("b", HOUR * 3, status=502), exchange("c", HOUR, status=429)]
    old = [exchange("d", DAY + HOUR), exchange("e", DAY * 2, status=500), exchange("f", DAY * 2)]
    with write_session(store) as opened:
        serving.save_exchanges(opened, [*made, *old])
        settled = dict.fromkeys([made[1].id, made[2].id, old[0].id, old[1].id])
        serving.settle_exchanges(opened, settled, at=NOW - minutes)
    found = told(file)
    assert found.hour == {"base": 2}
    assert found.day == {"base": 3, DATES: 1}
    assert found.failures == {429: 1, 502: 2}
    assert (found.unsettled, found.partial, found.used) == (5, False, True)


def test_the_reasons_why_the_base_model_answered_are_counted_by_conversation(store: Engine, file: Path) -> None:
    late = "no decision within 2 s"
    reasons = {"a": late, "b": late, "c": "no engine answers", "d": "", "e": "old"}
    with write_session(store) as opened:
        routes = [ConversationRoute(key, "base", {}, 2.0, why, NOW - HOUR) for key, why in reasons.items()]
        serving.save_routes(opened, [*routes[:4], replace(routes[4], at=NOW - DAY * 2)])
        serving.save_exchanges(opened, [exchange(key, HOUR * n) for key in reasons for n in (1, 2)])
    assert told(file).by_default == {late: 2, "no engine answers": 1}


def test_feedback_and_outcomes(store: Engine, file: Path) -> None:
    said = [Feedback("a", NOW - HOUR, score=score) for score in (0.0, 0.5, 0.9)]
    said += [Feedback("a", NOW, label="thumbs_up"), Feedback("a", NOW, comment="so so")]
    with write_session(store) as opened:
        save_cycle(opened, CYCLE)
        for one in [*said, Feedback("a", NOW - DAY * 2, score=1.0)]:
            serving.save_feedback(opened, one)
        kinds = {"s1": Outcome.SUCCESS, "s2": Outcome.SUCCESS, "u": Outcome.UNKNOWN}
        save_trajectories(opened, [trajectory(key, kind, cycle_id=None) for key, kind in kinds.items()])
        save_trajectories(opened, [trajectory("own"), trajectory("other", cycle_id=None, source="elsewhere")])
    found = told(file)
    assert found.feedback == {"comment": 1, "label thumbs_up": 1, "score 0.5 or more": 2, "score below 0.5": 1}
    assert found.outcomes == {"success": 2, "unknown": 1}


def test_it_reads_so_many_and_says_that_there_may_be_more(
    store: Engine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_standing, "MAX_EXCHANGES", 3)
    with write_session(store) as opened:
        serving.save_exchanges(opened, [exchange(f"c{n}", timedelta(minutes=n), model=f"m{n}@v1") for n in range(9)])
    found = told(file)
    assert (set(found.day), found.partial) == ({"m0@v1", "m1@v1", "m2@v1"}, True)


def test_the_cycles_that_may_have_fitted_a_router_are_those_of_the_repository(store: Engine, file: Path) -> None:
    with write_session(store) as opened:
        save_chain(opened)
        save_cycle(opened, replace(CYCLE, id="c2"))
        made = replace(adapter(2), cycle_id="c2", created_at=T0 + HOUR)
        save_adapter(opened, made)
        save_adapter(opened, replace(adapter(3), created_at=T0))
    with read_session(store) as opened:
        assert store_status(sqlite_url(file), NOW).fitting == cycles_with_adapters(opened) == ["c2", "c1"]


def test_a_conversation_is_found_by_its_id_and_by_an_answers(store: Engine) -> None:
    with write_session(store) as opened:
        save_chain(opened)
        serving.save_exchanges(opened, [replace(exchange("named", HOUR), response_id="r-1")])
        found = get_conversation(opened, "conv-1")
        assert found.route is not None
        assert [(one.id, one.body) for one in found.exchanges] == [("exchange-1", None)]
        assert [one.comment for one in found.feedback] == ["so so"]
        assert found.trajectories == []
        made = trajectory("router-1", cycle_id=None, turns=[])
        save_trajectories(opened, [made])
        serving.settle_exchanges(opened, {"exchange-1": "router-1"}, at=NOW)
        assert get_conversation(opened, "conv-1").trajectories == [made]
        by_answer = get_conversation(opened, "r-1")
        assert (by_answer.id, by_answer.route) == ("named", None)
        with pytest.raises(NotFound, match=r"no conversation 'conv-2' .*X-Traced-Conversation"):
            get_conversation(opened, "conv-2")


def test_what_an_adapter_was_given_of_how_many_and_how_it_went(store: Engine) -> None:
    with write_session(store) as opened:
        assert model_traffic(opened, DATES) == ModelTraffic(0, 0, None, {})
        assert model_traffic(opened, DATES).share is None
        models = {"a": DATES, "b": "base", "c": DATES, "d": "tools@v1"}
        routes = [
            ConversationRoute(key, model, {}, 0.1, "", NOW - HOUR * n) for n, (key, model) in enumerate(models.items())
        ]
        serving.save_routes(opened, routes)
        kinds = {"r1": Outcome.SUCCESS, "r2": Outcome.FAILURE, "r3": Outcome.SUCCESS, "r4": Outcome.UNKNOWN}
        made = [trajectory(key, kind, cycle_id=None, model=DATES) for key, kind in kinds.items()]
        shadow = replace(trajectory("r6", Outcome.SUCCESS, cycle_id=None, model=DATES), end_cause=EndCause.SHADOW)
        save_trajectories(opened, [*made, trajectory("r5", cycle_id=None), shadow])
    with read_session(store) as opened:
        found = model_traffic(opened, DATES)
    assert (found.conversations, found.decided, found.share, found.last) == (2, 4, 0.5, NOW)
    assert found.outcomes == {Outcome.FAILURE: 1, Outcome.SUCCESS: 2, Outcome.UNKNOWN: 1}
