"""Production and the router's traffic on a real PostgreSQL: what it says, and that an analysis holds what it cites."""

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos.postgres import missing
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute, Exchange, Feedback
from store.repositories import serving
from store.repositories.capabilities import count_labelled, save_labels
from store.repositories.traffic import ModelTraffic, model_traffic
from store.repositories.trajectories import (
    get_trajectory,
    lock_outcomes,
    newest_judged_ids,
    save_trajectories,
    update_outcome,
)
from store.repositories.trajectory_pages import PageFilter, trajectory_page
from store.status import RouterStatus, store_status
from store.types import Label, Outcome, Verdict
from tests.unit.store.canary import save_canary
from tests.unit.store.chain import CAPABILITY, T0, save_chain, trajectory

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]

HOUR = timedelta(hours=1)
NOW = T0 + 30 * HOUR


def fill(store: Engine) -> None:
    exchanges = [
        Exchange(f"e{n}", f"c{n % 4}", NOW - n * HOUR, "base" if n % 2 else "d@v1", 502 if n == 3 else 200, 0.1)
        for n in range(28)
    ]
    with write_session(store) as session:
        save_chain(session)
        kinds = [Outcome.FAILURE, Outcome.SUCCESS, Outcome.UNKNOWN]
        save_trajectories(
            session, [trajectory(f"r{n}", kinds[n % 3], split="", cycle_id=None, turns=[]) for n in range(6)]
        )
        serving.save_exchanges(session, exchanges)
        serving.settle_exchanges(
            session, {exchange.id: f"r{n % 6}" for n, exchange in enumerate(exchanges) if n > 1}, at=NOW
        )
        reasons = ["", "no engine answers"]
        serving.save_routes(
            session, [ConversationRoute(f"c{n}", "base", {}, 0.1, reasons[n % 2], NOW) for n in range(4)]
        )
        serving.save_feedback(session, Feedback("c1", NOW, score=0.7))


def read_traffic(store: Engine, url: str) -> tuple[RouterStatus, list[str], list[str], ModelTraffic, tuple[int, int]]:
    stands = store_status(url, NOW)
    with read_session(store) as session:
        newest_ids = newest_judged_ids(session, "desk", ["base"], limit=3)
        return stands.router, stands.fitting, newest_ids, model_traffic(session, "base"), count_labelled(session, "c1")


def test_the_progress_of_a_canary_equals_sqlite(url: str, tmp_path: Path) -> None:
    stores = {url: open_store(url), (file_url := sqlite_url(tmp_path / "traced.db")): open_store(file_url)}
    for store in stores.values():
        with write_session(store) as session:
            save_canary(session)
        store.dispose()
    [of_postgres], [of_sqlite] = (store_status(store_url, NOW).canaries for store_url in stores)
    assert of_postgres == of_sqlite
    assert of_postgres.canary.conversations == 2


def test_traffic_equals_sqlite_in_any_server_time_zone(url: str, tmp_path: Path) -> None:
    sqlite_store = open_store(sqlite_url(tmp_path / "traced.db"))
    postgres_store = open_store(url)
    fill(sqlite_store)
    fill(postgres_store)
    with postgres_store.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE \"{name}\" SET timezone = 'Asia/Tokyo'"))
        connection.commit()
    traffic = read_traffic(postgres_store, url)
    assert traffic == read_traffic(sqlite_store, sqlite_url(tmp_path / "traced.db"))
    assert sum(traffic[0].day.values()) == 4
    assert traffic[0].by_default == {"no engine answers": 2}
    sqlite_store.dispose()
    postgres_store.dispose()


def test_feedback_waits_for_an_analysis_that_is_about_to_cite_the_trajectory(url: str) -> None:
    store = open_store(url)
    fill(store)
    answers: list[bool] = []

    def judge() -> None:
        with write_session(store) as session:
            trajectory = get_trajectory(session, "r0")
            answers.append(update_outcome(session, replace(trajectory, outcome=Outcome.SUCCESS)))

    with write_session(store) as session:
        assert lock_outcomes(session, ["r0", "gone"]) == {"r0": Outcome.FAILURE}
        late = threading.Thread(target=judge)
        late.start()
        late.join(0.3)
        assert late.is_alive()
        save_labels(session, "c1", [Label("r0", CAPABILITY.name, 5, Verdict.LACKING)])
    late.join(20)
    assert answers == [False]
    with read_session(store) as session:
        assert get_trajectory(session, "r0").outcome is Outcome.FAILURE
    store.dispose()


def test_trajectory_pages_equal_those_of_sqlite(url: str, tmp_path: Path) -> None:
    sqlite_store, postgres_store = open_store(sqlite_url(tmp_path / "traced.db")), open_store(url)
    filters = [
        PageFilter(),
        PageFilter(source="desk", outcome=Outcome.FAILURE),
        PageFilter(text="i AM r"),
        PageFilter(text="GDAŃSK"),
        PageFilter(text="tool_calls"),
        PageFilter(cycle_id="c1", capability=CAPABILITY.name, verdict=Verdict.LACKING),
    ]
    pages = []
    for store in (sqlite_store, postgres_store):
        fill(store)
        messages = [{"role": "user", "content": "nach \udcff Gdańsk"}]
        with write_session(store) as session:
            save_trajectories(session, [trajectory("far", source="zoo", messages=messages)])
        with read_session(store) as session:
            first = [trajectory_page(session, criteria, limit=4) for criteria in filters]
            rest = [trajectory_page(session, criteria, limit=9, after_id="r1") for criteria in filters]
            pages.append((first, rest))
        store.dispose()
    assert pages[0] == pages[1]
    assert [len(page.rows) for page in pages[0][0]] == [4, 3, 4, 1, 0, 1]
