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
from tests.unit.store.chain import CAPABILITY, T0, save_chain, trajectory

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]

HOUR = timedelta(hours=1)
NOW = T0 + 30 * HOUR


def fill(store: Engine) -> None:
    made = [
        Exchange(f"e{n}", f"c{n % 4}", NOW - n * HOUR, "base" if n % 2 else "d@v1", 502 if n == 3 else 200, 0.1)
        for n in range(28)
    ]
    with write_session(store) as opened:
        save_chain(opened)
        kinds = [Outcome.FAILURE, Outcome.SUCCESS, Outcome.UNKNOWN]
        save_trajectories(
            opened, [trajectory(f"r{n}", kinds[n % 3], split="", cycle_id=None, turns=[]) for n in range(6)]
        )
        serving.save_exchanges(opened, made)
        serving.settle_exchanges(opened, {one.id: f"r{n % 6}" for n, one in enumerate(made) if n > 1}, at=NOW)
        reasons = ["", "no engine answers"]
        serving.save_routes(
            opened, [ConversationRoute(f"c{n}", "base", {}, 0.1, reasons[n % 2], NOW) for n in range(4)]
        )
        serving.save_feedback(opened, Feedback("c1", NOW, score=0.7))


def told(store: Engine, url: str) -> tuple[RouterStatus, list[str], list[str], ModelTraffic, tuple[int, int]]:
    stands = store_status(url, NOW)
    with read_session(store) as opened:
        newest = newest_judged_ids(opened, "desk", "base", limit=3)
        return stands.router, stands.fitting, newest, model_traffic(opened, "base"), count_labelled(opened, "c1")


def test_it_says_what_sqlite_says_whatever_the_servers_time_zone(url: str, tmp_path: Path) -> None:
    there = open_store(sqlite_url(tmp_path / "traced.db"))
    here = open_store(url)
    fill(there)
    fill(here)
    with here.connect() as connection:
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE \"{name}\" SET timezone = 'Asia/Tokyo'"))
        connection.commit()
    found = told(here, url)
    assert found == told(there, sqlite_url(tmp_path / "traced.db"))
    assert sum(found[0].day.values()) == 4
    assert found[0].by_default == {"no engine answers": 2}
    there.dispose()
    here.dispose()


def test_feedback_waits_for_an_analysis_that_is_about_to_cite_the_trajectory(url: str) -> None:
    store = open_store(url)
    fill(store)
    answers: list[bool] = []

    def judge() -> None:
        with write_session(store) as opened:
            stored = get_trajectory(opened, "r0")
            answers.append(update_outcome(opened, replace(stored, outcome=Outcome.SUCCESS)))

    with write_session(store) as opened:
        assert lock_outcomes(opened, ["r0", "gone"]) == {"r0": Outcome.FAILURE}
        late = threading.Thread(target=judge)
        late.start()
        late.join(0.3)
        assert late.is_alive()
        save_labels(opened, "c1", [Label("r0", CAPABILITY.name, 5, Verdict.LACKING)])
    late.join(20)
    assert answers == [False]
    with read_session(store) as opened:
        assert get_trajectory(opened, "r0").outcome is Outcome.FAILURE
    store.dispose()


def test_pages_of_trajectories_hold_what_sqlites_hold(url: str, tmp_path: Path) -> None:
    there, here = open_store(sqlite_url(tmp_path / "traced.db")), open_store(url)
    asked = [
        PageFilter(),
        PageFilter(source="desk", outcome=Outcome.FAILURE),
        PageFilter(text="i AM r"),
        PageFilter(text="GDAŃSK"),
        PageFilter(text="tool_calls"),
        PageFilter(cycle_id="c1", capability=CAPABILITY.name, verdict=Verdict.LACKING),
    ]
    found = []
    for store in (there, here):
        fill(store)
        said = [{"role": "user", "content": "nach \udcff Gdańsk"}]
        with write_session(store) as opened:
            save_trajectories(opened, [trajectory("far", source="zoo", messages=said)])
        with read_session(store) as opened:
            first = [trajectory_page(opened, wanted, limit=4) for wanted in asked]
            rest = [trajectory_page(opened, wanted, limit=9, after_id="r1") for wanted in asked]
            found.append((first, rest))
        store.dispose()
    assert found[0] == found[1]
    assert [len(page.rows) for page in found[0][0]] == [4, 3, 4, 1, 0, 1]
