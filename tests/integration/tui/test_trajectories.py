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
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
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


def screen(tui: RunningApp) -> Trajectories:
    active_screen = tui.app.screen
    assert isinstance(active_screen, Trajectories)
    return active_screen


async def open_trajectories(tui: RunningApp) -> None:
    """Open the trajectories screen and wait for its first page."""
    tui.app.action_show("trajectories")
    await wait_until(tui.pilot, lambda: "more below" in text_of(tui.app) and "reward" in text_of(tui.app))


async def select_option(tui: RunningApp, select: str, value: str) -> None:
    """Select an option of a filter."""
    widget = tui.app.screen.query_one(f"#{select}", Select)
    await wait_until(tui.pilot, lambda: value in [option for _, option in widget._options])
    widget.value = value


def loaded(tui: RunningApp, count: int) -> Callable[[], bool]:
    return lambda: f" {count} loaded" in text_of(tui.app)


@pytest.mark.parametrize("size", SIZES)
async def test_pictures(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_trajectories(tui)
        await same_picture(tui.app, "trajectories")
        await select_option(tui, "capability", "date-reasoning")
        await select_option(tui, "label", "lacking")
        await wait_until(tui.pilot, loaded(tui, 19))
        await tui.pilot.press("escape", "down", "space", "space")
        await wait_until(tui.pilot, lambda: "2 selected" in text_of(tui.app))
        await same_picture(tui.app, "trajectories-lacking")
        await tui.pilot.press("e")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Export))
        tui.app.screen.query_one("#why").display = False  # contains this machine's folder
        await tui.pilot.pause()
        await same_picture(tui.app, "trajectories-export")


async def test_further_pages_come_as_the_cursor_nears_the_end_and_far_ones_are_let_go(
    open_app: OpenApp, store: Engine
) -> None:
    with write_session(store) as session:
        save_trajectories(session, [trajectory(f"t{number:04d}", source="a", cycle_id=None) for number in range(1000)])
    async with open_app() as tui:
        await open_trajectories(tui)
        table, ids = screen(tui)._table, set[str]()
        with write_session(store) as session:
            all_ids = set(iterate_ids(session))
        while "more below" in text_of(tui.app):
            await tui.pilot.press("ctrl+end")
            ids |= set(screen(tui)._rows())
            assert table.row_count <= MAX_ROWS + 100
            assert screen(tui).size.height > table.cursor_row - table.scroll_offset.y >= 0
        assert ids == all_ids
        selected = table.selected
        while screen(tui)._window.first:
            await tui.pilot.press("ctrl+home")
            await wait_until(tui.pilot, lambda: not screen(tui)._loading)
        await tui.pilot.press("ctrl+home")
        assert table.selected == "t0000" != selected


async def test_each_filter_asks_for_what_fits(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("f")
        assert tui.app.focused is tui.app.screen.query_one("#outcome")
        await tui.pilot.press("enter", "i", "enter", "tab")
        assert tui.app.focused is tui.app.screen.query_one("#source")
        await wait_until(tui.pilot, lambda: "more below" not in text_of(tui.app))
        assert {row.outcome for row in screen(tui)._window.rows} == {"infrastructure"}
        await select_option(tui, "source", "desk")
        await select_option(tui, "cycle", "c-0002")
        await wait_until(tui.pilot, lambda: "labelled by c-0002" in text_of(tui.app))
        await tui.pilot.press("r")
        await wait_until(tui.pilot, loaded(tui, 100))
        await select_option(tui, "cycle", "c-0001")
        await select_option(tui, "capability", "compound-requests")
        await select_option(tui, "label", "present")
        query = TrajectoryQuery(cycle="c-0001", capability="compound-requests", label="present")
        rows = (await tui.client.trajectories.page(query)).rows
        await wait_until(tui.pilot, loaded(tui, len(rows)))
        assert all("present" in row.verdicts for row in rows)
        await tui.pilot.press("r", "slash", *"gdańsk", "enter")
        matching_rows = (await tui.client.trajectories.page(TrajectoryQuery(text="Gdańsk"))).rows
        await wait_until(tui.pilot, loaded(tui, len(matching_rows)))
        assert tui.app.focused is screen(tui)._table
        assert all("Gdańsk" in row.asked for row in screen(tui)._window.rows)


async def test_what_fits_nothing_says_so_and_how_to_go_back(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("slash", *"zebra")
        await wait_until(tui.pilot, lambda: "No trajectory matches the filters; r removes them." in text_of(tui.app))
        await tui.pilot.press("escape", "r")
        await wait_until(tui.pilot, loaded(tui, 100))
        assert "No trajectory matches" not in text_of(tui.app)


async def test_where_the_daemon_gave_up_a_person_looks_further(
    open_app: OpenApp, store: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("store.repositories.trajectory_pages.MAX_SCANNED", 250)
    with write_session(store) as session:
        save_trajectories(session, [trajectory(f"t{number:04d}", source="a", cycle_id=None) for number in range(1000)])
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("slash", *"router-000039", "enter")
        await wait_until(tui.pilot, lambda: "250 searched" in text_of(tui.app))
        assert "Further" in text_of(tui.app)
        await tui.pilot.press("m")
        await wait_until(tui.pilot, lambda: "1 loaded" in text_of(tui.app))
        assert "router-000039" in text_of(tui.app)


async def test_enter_reads_with_the_capability_that_is_filtered(open_app: OpenApp) -> None:
    async def read() -> None:
        async with open_app() as tui:
            await open_trajectories(tui)
            await select_option(tui, "capability", "date-reasoning")
            await select_option(tui, "label", "lacking")
            await wait_until(tui.pilot, loaded(tui, 19))
            await tui.pilot.press("escape", "enter")
            await wait_until(tui.pilot, lambda: "cited: ✗ date-reasoning lacking" in text_of(tui.app))
            conversation = tui.app.screen
            assert isinstance(conversation, Conversation)
            assert (conversation.trajectory_id, conversation.capability) == ("c-0003-000-0", "date-reasoning")
            assert "policy-checks" not in text_of(tui.app)
            await tui.pilot.press("escape")
            assert isinstance(tui.app.screen, Trajectories)

    await read()


async def test_what_is_chosen_is_written_in_full_and_nothing_is_overwritten_unasked(
    open_app: OpenApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("space", "down", "space")
        await wait_until(tui.pilot, lambda: "2 selected" in text_of(tui.app))
        await tui.pilot.press("e", "enter")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, Export))
        path = tmp_path / "trajectories.jsonl"
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        with write_session(tui.control.store) as session:
            expected = [get_trajectory(session, key, tokens=False) for key in ("router-000000", "router-000002")]
        assert [(record["id"], record["messages"], record["tools"]) for record in records] == [
            (row.id, row.messages, row.tools) for row in expected
        ]
        await tui.pilot.press("a", "x")
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "already exists" in text_of(tui.app))
        assert len(path.read_text("utf-8").splitlines()) == 2
        tui.app.screen.query_one("#path", Input).value = "other.jsonl"
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, Export))
        assert len((tmp_path / "other.jsonl").read_text("utf-8").splitlines()) == 100
        await tui.pilot.press("a", "x", "enter")
        await wait_until(tui.pilot, lambda: "already exists" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: not isinstance(tui.app.screen, Export))
        assert len(path.read_text("utf-8").splitlines()) == 1
        assert sorted(file.name for file in tmp_path.glob("*.jsonl*")) == ["other.jsonl", "trajectories.jsonl"]


async def test_a_path_that_cannot_be_written_says_why(open_app: OpenApp, tmp_path: Path) -> None:
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("e")
        for path, message in (
            (tmp_path / "none" / "x", "No such file"),
            (tmp_path, "Enter a file name"),
            ("~nobody-of-this-name/x", "Not written"),
            ("x" * 300, "File name too long"),
            ("", "Enter a file name"),
        ):
            tui.app.screen.query_one("#path", Input).value = str(path)
            await tui.pilot.press("enter")
            await wait_until(tui.pilot, lambda message=message: message in text_of(tui.app))
        await tui.pilot.press("escape")
        assert isinstance(tui.app.screen, Trajectories)


async def test_a_page_that_does_not_come_is_not_asked_for_without_end(
    open_app: OpenApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []

    async def fail(*_: object, **__: object) -> None:
        requests.append("page")
        raise NoDaemon("no daemon answers")

    async with open_app() as tui:
        await open_trajectories(tui)
        monkeypatch.setattr("traced.client.trajectories.Trajectories.page", fail)
        await tui.pilot.press("end")
        await wait_until(tui.pilot, lambda: "no daemon answers" in text_of(tui.app))
        await asyncio.sleep(1)
        assert len(requests) <= 3


async def test_hostile_text_is_shown_as_harmless_text(open_app: OpenApp, store: Engine) -> None:
    messages = [{"role": "user", "content": HOSTILE}, {"role": HOSTILE[:40], "content": [1, None, {"text": HOSTILE}]}]
    with write_session(store) as session:
        fields: dict[str, Any] = {
            "id": "[red]\x1b[0m\u202e",
            "task_id": "[b]",
            "model": "\u202e[i]",
            "source": "[/]",
            "messages": messages,
        }
        fields |= {"cycle_id": None}
        save_trajectories(session, [trajectory(**fields)])
    async with open_app() as tui:
        tui.app.action_show("trajectories")
        await wait_until(tui.pilot, lambda: "[red]␛[0m‹U+202E›" in text_of(tui.app))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "‹U+202E›evil‹U+202C› [bold]no[/bold] �" in text_of(tui.app))
        assert "\x1b" not in text_of(tui.app)
        assert "more characters are not shown" in "".join(block.body for block in tui.app.screen.query_one(Talk).blocks)


@pytest.mark.parametrize(
    "event",
    [
        Event(NOW, "stage finished", "collect"),
        Event(NOW, "traffic", detail={"exchanges": {"base": 3}, "settled": 1}),
        Event(NOW, "traffic", detail={"feedback": 1}),
        Event(NOW, "import", "openai", detail={"trajectories": 1}),
    ],
    ids=lambda event: event.kind,
)
async def test_what_is_new_comes_by_itself_and_the_cursor_stays(open_app: OpenApp, store: Engine, event: Event) -> None:
    async with open_app() as tui:
        await open_trajectories(tui)
        await tui.pilot.press("down", "down")
        with write_session(store) as session:
            record = get_trajectory(session, "router-000000", tokens=False)
            save_trajectories(session, [replace(record, id="router-00000-0", task_id="conv-000000")])
            save_event(session, event)
        await wait_until(tui.pilot, lambda: "router-00000-0" in text_of(tui.app))
        assert screen(tui)._table.selected == "router-000002"


@pytest.mark.parametrize("size", SIZES)
async def test_an_empty_store_says_where_trajectories_come_from(tmp_path: Path, size: tuple[int, int]) -> None:
    store = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), store, RecordingLoop(), lambda: NOW, NOW, state="ready")  # type: ignore[arg-type]
    async with serve_api(control, tmp_path / "s"):
        app = TracedApp(Address(tmp_path / "s", read_only=True))
        async with app.run_test(size=size) as pilot:
            await wait_until(pilot, lambda: app.linked and app.status is not None)
            app.action_show("trajectories")
            await wait_until(pilot, lambda: "No trajectories yet" in text_of(app))
            await pilot.press("enter", "space", "a", "e", "m")
            assert isinstance(app.screen, Trajectories)
            await same_picture(app, "trajectories-empty")
    store.dispose()
