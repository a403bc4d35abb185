"""Trajectories: looked through page by page, filtered, chosen, written to a file."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from textual.widgets import Input, Select

from store.database import open_store, sqlite_url, write_session
from store.records import Event
from store.repositories.events import save_event
from store.repositories.trajectories import get_trajectory, iterate_ids, save_trajectories
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from tests.unit.store.chain import trajectory
from traced.api.control import Control
from traced.client import NoDaemon
from traced.client.trajectories import TrajectoryQuery
from traced.config.settings import load_settings
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.conversation import Conversation
from tui.screens.trajectories import Trajectories
from tui.widgets.conversation import Talk
from tui.widgets.dialogs import Export
from tui.widgets.tables import MAX_ROWS

HOSTILE = "\x1b[31mred\x1b[0m \u202eevil\u202c [bold]no[/bold] \ud800 \x00" + "x" * 1_000_000


def screen(on: Running) -> Trajectories:
    found = on.app.screen
    assert isinstance(found, Trajectories)
    return found


async def look(on: Running) -> None:
    """Go there, and wait for the first page."""
    on.app.action_show("trajectories")
    await until(on.pilot, lambda: "more below" in text_of(on.app) and "reward" in text_of(on.app))


async def choose(on: Running, select: str, value: str) -> None:
    """Choose an option."""
    there = on.app.screen.query_one(f"#{select}", Select)
    await until(on.pilot, lambda: value in [one for _, one in there._options])
    there.value = value


def loaded(on: Running, count: int) -> Callable[[], bool]:
    return lambda: f" {count} loaded" in text_of(on.app)


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await look(on)
        await same_picture(on.app, "trajectories")
        await choose(on, "capability", "date-reasoning")
        await choose(on, "label", "lacking")
        await until(on.pilot, loaded(on, 19))
        await on.pilot.press("escape", "down", "space", "space")
        await until(on.pilot, lambda: "2 selected" in text_of(on.app))
        await same_picture(on.app, "trajectories-lacking")
        await on.pilot.press("e")
        await until(on.pilot, lambda: isinstance(on.app.screen, Export))
        on.app.screen.query_one("#why").display = False  # names this machine's folder
        await on.pilot.pause()
        await same_picture(on.app, "trajectories-export")


async def test_further_pages_come_as_the_cursor_nears_the_end_and_far_ones_are_let_go(
    opened: Opened, store: Engine
) -> None:
    with write_session(store) as writing:
        save_trajectories(writing, [trajectory(f"t{number:04d}", source="a", cycle_id=None) for number in range(1000)])
    async with opened() as on:
        await look(on)
        table, seen = screen(on)._table, set[str]()
        with write_session(store) as reading:
            everything = set(iterate_ids(reading))
        while "more below" in text_of(on.app):
            await on.pilot.press("ctrl+end")
            seen |= set(screen(on)._rows())
            assert table.row_count <= MAX_ROWS + 100
            assert screen(on).size.height > table.cursor_row - table.scroll_offset.y >= 0
        assert seen == everything
        before = table.selected
        while screen(on)._window.first:
            await on.pilot.press("ctrl+home")
            await until(on.pilot, lambda: not screen(on)._loading)
        await on.pilot.press("ctrl+home")
        assert table.selected == "t0000" != before


async def test_each_filter_asks_for_what_fits(opened: Opened) -> None:
    async with opened() as on:
        await look(on)
        await on.pilot.press("f")
        assert on.app.focused is on.app.screen.query_one("#outcome")
        await on.pilot.press("enter", "i", "enter", "tab")
        assert on.app.focused is on.app.screen.query_one("#source")
        await until(on.pilot, lambda: "more below" not in text_of(on.app))
        assert {row.outcome for row in screen(on)._window.rows} == {"infrastructure"}
        await choose(on, "source", "desk")
        await choose(on, "cycle", "c-0002")
        await until(on.pilot, lambda: "labelled by c-0002" in text_of(on.app))
        await on.pilot.press("r")
        await until(on.pilot, loaded(on, 100))
        await choose(on, "cycle", "c-0001")
        await choose(on, "capability", "compound-requests")
        await choose(on, "label", "present")
        asked = TrajectoryQuery(cycle="c-0001", capability="compound-requests", label="present")
        rows = (await on.client.trajectories.page(asked)).rows
        await until(on.pilot, loaded(on, len(rows)))
        assert all("present" in row.verdicts for row in rows)
        await on.pilot.press("r", "slash", *"gdańsk", "enter")
        found = (await on.client.trajectories.page(TrajectoryQuery(text="Gdańsk"))).rows
        await until(on.pilot, loaded(on, len(found)))
        assert on.app.focused is screen(on)._table
        assert all("Gdańsk" in row.asked for row in screen(on)._window.rows)


async def test_what_fits_nothing_says_so_and_how_to_go_back(opened: Opened) -> None:
    async with opened() as on:
        await look(on)
        await on.pilot.press("slash", *"zebra")
        await until(on.pilot, lambda: "No trajectory matches the filters; r removes them." in text_of(on.app))
        await on.pilot.press("escape", "r")
        await until(on.pilot, loaded(on, 100))
        assert "No trajectory matches" not in text_of(on.app)


async def test_where_the_daemon_gave_up_a_person_looks_further(
    opened: Opened, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.repositories.trajectory_pages.MAX_SCANNED", 250)
    with write_session(store) as writing:
        save_trajectories(writing, [trajectory(f"t{number:04d}", source="a", cycle_id=None) for number in range(1000)])
    async with opened() as on:
        await look(on)
        await on.pilot.press("slash", *"router-000039", "enter")
        await until(on.pilot, lambda: "250 searched" in text_of(on.app))
        assert "Further" in text_of(on.app)
        await on.pilot.press("m")
        await until(on.pilot, lambda: "1 loaded" in text_of(on.app))
        assert "router-000039" in text_of(on.app)


async def test_enter_reads_with_the_capability_that_is_filtered(opened: Opened) -> None:
    async def read() -> None:
        async with opened() as on:
            await look(on)
            await choose(on, "capability", "date-reasoning")
            await choose(on, "label", "lacking")
            await until(on.pilot, loaded(on, 19))
            await on.pilot.press("escape", "enter")
            await until(on.pilot, lambda: "cited: ✗ date-reasoning lacking" in text_of(on.app))
            read = on.app.screen
            assert isinstance(read, Conversation)
            assert (read.trajectory_id, read.capability) == ("c-0003-000-0", "date-reasoning")
            assert "policy-checks" not in text_of(on.app)
            await on.pilot.press("escape")
            assert isinstance(on.app.screen, Trajectories)

    await read()


async def test_what_is_chosen_is_written_in_full_and_nothing_is_overwritten_unasked(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened() as on:
        await look(on)
        await on.pilot.press("space", "down", "space")
        await until(on.pilot, lambda: "2 selected" in text_of(on.app))
        await on.pilot.press("e", "enter")
        await until(on.pilot, lambda: not isinstance(on.app.screen, Export))
        path = tmp_path / "trajectories.jsonl"
        written = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        with write_session(on.control.store) as reading:
            kept = [get_trajectory(reading, key, tokens=False) for key in ("router-000000", "router-000002")]
        assert [(one["id"], one["messages"], one["tools"]) for one in written] == [
            (one.id, one.messages, one.tools) for one in kept
        ]
        await on.pilot.press("a", "x")
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "already exists" in text_of(on.app))
        assert len(path.read_text("utf-8").splitlines()) == 2
        on.app.screen.query_one("#path", Input).value = "other.jsonl"
        await on.pilot.press("enter")
        await until(on.pilot, lambda: not isinstance(on.app.screen, Export))
        assert len((tmp_path / "other.jsonl").read_text("utf-8").splitlines()) == 100
        await on.pilot.press("a", "x", "enter")
        await until(on.pilot, lambda: "already exists" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: not isinstance(on.app.screen, Export))
        assert len(path.read_text("utf-8").splitlines()) == 1
        assert sorted(one.name for one in tmp_path.glob("*.jsonl*")) == ["other.jsonl", "trajectories.jsonl"]


async def test_a_path_that_cannot_be_written_says_why(opened: Opened, tmp_path: Path) -> None:
    async with opened() as on:
        await look(on)
        await on.pilot.press("e")
        for path, why in (
            (tmp_path / "none" / "x", "No such file"),
            (tmp_path, "Enter a file name"),
            ("~nobody-of-this-name/x", "Not written"),
            ("x" * 300, "File name too long"),
            ("", "Enter a file name"),
        ):
            on.app.screen.query_one("#path", Input).value = str(path)
            await on.pilot.press("enter")
            await until(on.pilot, lambda why=why: why in text_of(on.app))
        await on.pilot.press("escape")
        assert isinstance(on.app.screen, Trajectories)


async def test_a_page_that_does_not_come_is_not_asked_for_without_end(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def lost(*_: object, **__: object) -> None:
        asked.append("page")
        raise NoDaemon("no daemon answers")

    async with opened() as on:
        await look(on)
        monkeypatch.setattr("traced.client.trajectories.Trajectories.page", lost)
        await on.pilot.press("end")
        await until(on.pilot, lambda: "no daemon answers" in text_of(on.app))
        await asyncio.sleep(1)
        assert len(asked) <= 3


async def test_hostile_text_is_shown_as_harmless_text(opened: Opened, store: Engine) -> None:
    said = [{"role": "user", "content": HOSTILE}, {"role": HOSTILE[:40], "content": [1, None, {"text": HOSTILE}]}]
    with write_session(store) as writing:
        told: dict[str, Any] = {
            "id": "[red]\x1b[0m\u202e",
            "task_id": "[b]",
            "model": "\u202e[i]",
            "source": "[/]",
            "messages": said,
        }
        told |= {"cycle_id": None}
        save_trajectories(writing, [trajectory(**told)])
    async with opened() as on:
        on.app.action_show("trajectories")
        await until(on.pilot, lambda: "[red]␛[0m‹U+202E›" in text_of(on.app))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "‹U+202E›evil‹U+202C› [bold]no[/bold] �" in text_of(on.app))
        assert "\x1b" not in text_of(on.app)
        assert "more characters are not shown" in "".join(one.body for one in on.app.screen.query_one(Talk).blocks)


@pytest.mark.parametrize(
    "told",
    [
        Event(AT, "stage finished", "collect"),
        Event(AT, "traffic", detail={"exchanges": {"base": 3}, "settled": 1}),
        Event(AT, "traffic", detail={"feedback": 1}),
        Event(AT, "import", "openai", detail={"trajectories": 1}),
    ],
    ids=lambda told: told.kind,
)
async def test_what_is_new_comes_by_itself_and_the_cursor_stays(opened: Opened, store: Engine, told: Event) -> None:
    async with opened() as on:
        await look(on)
        await on.pilot.press("down", "down")
        with write_session(store) as writing:
            one = get_trajectory(writing, "router-000000", tokens=False)
            save_trajectories(writing, [replace(one, id="router-00000-0", task_id="conv-000000")])
            save_event(writing, told)
        await until(on.pilot, lambda: "router-00000-0" in text_of(on.app))
        assert screen(on)._table.selected == "router-000002"


@pytest.mark.parametrize("size", SIZES)
async def test_an_empty_store_says_where_trajectories_come_from(tmp_path: Path, size: tuple[int, int]) -> None:
    store = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), store, WrittenDown(), lambda: AT, AT, state="ready")  # type: ignore[arg-type]
    async with served(control, tmp_path / "s"):
        app = TracedApp(Address(tmp_path / "s", read_only=True))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.linked and app.status is not None)
            app.action_show("trajectories")
            await until(pilot, lambda: "No trajectories yet" in text_of(app))
            await pilot.press("enter", "space", "a", "e", "m")
            assert isinstance(app.screen, Trajectories)
            await same_picture(app, "trajectories-empty")
    store.dispose()
