"""Pages of trajectories: every match once, nothing else, bounded work."""

from typing import Any

import pytest
from sqlalchemy import event
from sqlmodel import Session

from store.errors import NotFound
from store.repositories import capabilities, trajectory_pages
from store.repositories.trajectories import save_trajectories
from store.repositories.trajectory_pages import PageFilter, first_words, trajectory_page, trials_of
from store.types import Label, Outcome, Verdict
from tests.unit.store.chain import CAPABILITY, save_origin, trajectory


def walk_pages(session: Session, criteria: PageFilter, limit: int = 7) -> list[str]:
    """Return the ids of all pages."""
    ids, cursor = list[str](), None
    while True:
        page = trajectory_page(session, criteria, limit=limit, after_id=cursor)
        assert len(page.rows) <= limit
        ids += [row.id for row in page.rows]
        if page.next is None:
            return ids
        cursor = page.next


@pytest.fixture
def many_trajectories(db: Session) -> Session:
    save_origin(db)
    messages = [{"role": "user", "content": [{"type": "text", "text": "Wo ist\nGdaŃsk?"}]}]
    save_trajectories(db, [trajectory(f"m{number:03d}", task_id=str(number % 9)) for number in range(60)])
    save_trajectories(db, [trajectory("far", Outcome.SUCCESS, source="zoo", messages=messages)])
    return db


@pytest.mark.parametrize("source", ["", "desk"])
def test_pages_have_every_row_once_in_listing_order(many_trajectories: Session, source: str) -> None:
    ids = walk_pages(many_trajectories, PageFilter(source=source))
    assert len(ids) == len(set(ids)) == (62 if source else 63)
    assert ("far" in ids) is (not source)
    assert ids == walk_pages(many_trajectories, PageFilter(source=source), limit=200)


def test_concurrent_saves_hide_no_row(many_trajectories: Session) -> None:
    first = trajectory_page(many_trajectories, PageFilter(), limit=10)
    save_trajectories(many_trajectories, [trajectory("early", source="a")])
    rest = trajectory_page(many_trajectories, PageFilter(), limit=200, after_id=first.next)
    assert len({row.id for row in [*first.rows, *rest.rows]}) == 63


def test_filters_select_matching_rows(many_trajectories: Session) -> None:
    assert walk_pages(many_trajectories, PageFilter(outcome=Outcome.SUCCESS)) == ["t2", "far"]
    assert walk_pages(many_trajectories, PageFilter(text="i am M007")) == ["m007"]
    for text in ("GDAŃSK", "gdańsk", "wo ist\ngda"):
        assert walk_pages(many_trajectories, PageFilter(text=text)) == ["far"]
    assert walk_pages(many_trajectories, PageFilter(text="m05")) == walk_pages(
        many_trajectories, PageFilter(text="I am m05")
    )
    for words in ("role", "assistant", "tool_calls", "content", '"', "%", "_"):
        assert walk_pages(many_trajectories, PageFilter(text=words)) == []


def test_labels_are_those_of_the_cycle(many_trajectories: Session) -> None:
    capabilities.save_labels(many_trajectories, "c1", [Label("m001", CAPABILITY.name, 0, Verdict.PRESENT, 1)])
    assert walk_pages(many_trajectories, PageFilter(cycle_id="c1")) == ["m001", "t1", "t2"]
    assert walk_pages(many_trajectories, PageFilter(cycle_id="c1", verdict=Verdict.LACKING)) == ["t1"]
    page = trajectory_page(
        many_trajectories, PageFilter(cycle_id="c1", capability=CAPABILITY.name, outcome=Outcome.FAILURE), limit=9
    )
    assert [(row.id, row.verdicts) for row in page.rows] == [
        ("m001", {Verdict.PRESENT: 1}),
        ("t1", {Verdict.LACKING: 2}),
    ]
    assert walk_pages(many_trajectories, PageFilter(cycle_id="c0")) == []


@pytest.mark.parametrize("capability", ["", CAPABILITY.name])
def test_labels_of_a_cycle_are_read_once_per_page(
    many_trajectories: Session, monkeypatch: pytest.MonkeyPatch, capability: str
) -> None:
    ids = [f"m{number:03d}" for number in range(60)]
    labels = [Label(key, CAPABILITY.name, run, Verdict.PRESENT, 1) for key in ids for run in (0, 1)]
    capabilities.save_labels(many_trajectories, "c1", labels)
    criteria = PageFilter(cycle_id="c1", capability=capability, outcome=Outcome.FAILURE, text="m0")
    at_once = walk_pages(many_trajectories, criteria, limit=200)
    assert set(at_once) == set(ids)
    monkeypatch.setattr(trajectory_pages, "SCAN_SIZE", 7)
    plans: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if "labels" in statement and "trajectories" in statement and not statement.startswith("EXPLAIN"):
            plans.append(str(connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()))

    event.listen(many_trajectories.get_bind(), "before_cursor_execute", explain)
    assert walk_pages(many_trajectories, criteria, limit=200) == at_once
    [plan] = plans
    assert not capability or "(cycle_id=? AND run=? AND capability=?)" in plan
    event.remove(many_trajectories.get_bind(), "before_cursor_execute", explain)
    assert walk_pages(many_trajectories, criteria, limit=13) == at_once


def test_a_search_stops_at_the_limit_and_continues(many_trajectories: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectory_pages, "MAX_SCANNED", 20)
    monkeypatch.setattr(trajectory_pages, "SCAN_SIZE", 10)
    page = trajectory_page(many_trajectories, PageFilter(outcome=Outcome.SUCCESS, source="zoo"), limit=5)
    assert ([row.id for row in page.rows], page.next, page.gave_up) == (["far"], None, False)
    page = trajectory_page(many_trajectories, PageFilter(text="Gdańsk"), limit=5)
    assert (page.rows, page.looked_at, page.gave_up) == ([], 20, True)
    assert walk_pages(many_trajectories, PageFilter(text="gdańsk")) == ["far"]


def test_the_other_trials_of_a_task(many_trajectories: Session) -> None:
    assert [item.id for item in trials_of(many_trajectories, "t1", limit=9)] == ["t2"]
    with pytest.raises(NotFound):
        trials_of(many_trajectories, "none", limit=9)
    with pytest.raises(NotFound):
        trajectory_page(many_trajectories, PageFilter(), limit=9, after_id="none")


def test_sources_and_cycles_to_filter_by(many_trajectories: Session) -> None:
    assert trajectory_pages.sources(many_trajectories, limit=9) == ["desk", "zoo"]
    assert trajectory_pages.sources(many_trajectories, limit=1) == ["desk"]
    assert [vars(item) for item in trajectory_pages.labelled_cycles(many_trajectories, limit=9)] == [
        {"cycle_id": "c1", "capabilities": [CAPABILITY.name]}
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ""),
        (["no message", {"role": "user"}], ""),
        ([{"role": "user", "content": [1, {"text": "a\n b"}, {"text": None}, {"text": "c"}]}], "a b c"),
        ([{"role": "user", "content": "x" * 999}], "x" * 200),
    ],
)
def test_the_first_words(messages: list[dict[str, object]], words: str) -> None:
    assert first_words(messages) == words
