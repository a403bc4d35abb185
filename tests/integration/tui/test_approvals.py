"""The approvals screen: the case, every key, and what is shown where nothing is or may be done."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update
from textual.events import Key
from textual.widgets import Button, Input

from store.database import open_store, sqlite_url, write_session
from store.records import Event
from store.repositories.events import save_event
from store.repositories.promotions import latest_approval, latest_gate, save_gate
from store.tables import CapabilityRow
from store.types import GateAnswer
from tests.integration.service.conftest import WrittenDown
from tests.integration.service.served import served
from tests.integration.tui.approving import KEY, publishable, shown, there
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import SIZES, same_picture, text_of, until
from traced.api.control import Control
from traced.config.settings import load_settings
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.approvals import Approvals
from tui.screens.conversation import SideBySide
from tui.screens.decision import Decision
from tui.widgets.tables import KeyedTable

BIDI = "‹U+202E›"


@pytest.fixture
def control(tmp_path: Path, control: Control) -> Control:
    return publishable(tmp_path, control)


def table(on: Running, name: str) -> KeyedTable:
    return on.app.screen.query_one(f"#{name}", KeyedTable)


async def test_a_confirmation_does_not_overtake_what_was_typed_before_it(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("a")
        await until(on.pilot, lambda: isinstance(on.app.screen, Decision) and on.app.focused is not None)
        for sign in "reads well":
            on.app.post_message(Key("space" if sign == " " else sign, sign))
        on.app.post_message(Key("ctrl+y", None))
        await until(on.pilot, lambda: "✓ approved by" in shown(on))
        [entry] = await on.client.audit()
        assert entry.reason == "reads well"


@pytest.mark.parametrize("size", SIZES)
async def test_the_whole_case_is_on_one_screen(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size) as on:
        await there(on)
        await same_picture(on.app, "approvals")
        await on.pilot.press("a")
        await until(on.pilot, lambda: isinstance(on.app.screen, Decision))
        await same_picture(on.app, "approvals-approve")
        await on.pilot.press("escape", "enter", "enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, SideBySide))
        await same_picture(on.app, "approvals-episodes")
        await on.pilot.press("escape", "shift+tab", "end")
        await until(on.pilot, lambda: "decisions   none yet" in shown(on))
        await same_picture(on.app, "approvals-lineage")


async def test_an_adapter_is_approved_with_a_reason_and_by_the_chosen_way(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("a")
        await until(on.pilot, lambda: isinstance(on.app.screen, Decision))
        assert f"Approve {on.seeded.waiting}" in shown(on)
        await on.pilot.press(*"reads well", "enter", "down", "space")
        assert isinstance(on.app.screen, Decision), "Enter in the reason decides nothing"
        assert "▐●▌ canary" in shown(on)
        await on.pilot.press("ctrl+y")
        await until(on.pilot, lambda: "✓ approved by" in shown(on))
        assert "canary" in shown(on)
        status = await on.client.status()
        assert status.waiting == []
        [one] = [one for one in status.adapters if one.name == on.seeded.waiting]
        assert (one.decision, one.trial) == ("approved", "canary")
        [entry] = await on.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("approve", on.seeded.waiting, "reads well")


async def test_the_button_names_the_adapter_and_is_reached_by_tab_alone(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("r")
        await until(on.pilot, lambda: isinstance(on.app.screen, Decision))
        assert isinstance(on.app.focused, Input)
        await on.pilot.press("enter")
        await until(on.pilot, lambda: on.app.focused is on.app.screen.query_one("#leave"))
        await on.pilot.press("tab")
        await until(on.pilot, lambda: on.app.focused is on.app.screen.query_one("#confirm"))
        assert f"Reject {on.seeded.waiting}" in str(on.app.screen.query_one("#confirm", Button).label)
        await on.pilot.press("enter")
        await until(on.pilot, lambda: "✗ rejected by" in shown(on))
        with write_session(on.control.store) as store:
            decided = latest_approval(store, on.seeded.waiting)
        assert decided is not None
        assert decided.decision == "rejected"


@pytest.mark.parametrize("leave", [("escape",), ("enter", "enter"), ("tab", "enter")])
async def test_leaving_decides_nothing(opened: Opened, leave: tuple[str, ...]) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("r", *leave)
        await until(on.pilot, lambda: isinstance(on.app.screen, Approvals))
        assert await on.client.audit() == []


async def test_more_episodes_are_asked_for_and_only_rejecting_is_left_meanwhile(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("m")
        await until(on.pilot, lambda: isinstance(on.app.screen, Decision))
        assert "Promotion policy" not in shown(on)
        await same_picture(on.app, "approvals-more")
        await on.pilot.press(*"too few", "ctrl+y")
        await until(on.pilot, lambda: "… more episodes, round 3 of 3, requested by" in shown(on))
        footer = shown(on).splitlines()[-1]
        assert ("Reject" in footer, "Approve " in footer, "More" in footer) == (True, False, False)
        await on.pilot.press("a", "m")
        assert isinstance(on.app.screen, Approvals)
        [entry] = await on.client.audit()
        assert (entry.action, entry.reason, entry.detail["look"]) == ("more-episodes", "too few", 3)
        with write_session(on.control.store) as store:
            gate = latest_gate(store, on.seeded.waiting)
            assert gate is not None
            newer = replace(gate.result, answer=GateAnswer.INCONCLUSIVE, rounds=3)
            save_gate(store, newer, cycle_id="c-0003", at=AT)
            save_event(store, Event(AT, "stage finished", "gate", "c-0003"))
        await until(on.pilot, lambda: "gate: inconclusive after round 3 of 3 (the last)" in shown(on))
        assert "before:" in shown(on)


async def test_a_paused_service_says_when_it_takes_the_look(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.client.pause("a test")
        await on.client.approvals.more_episodes(await on.client.approvals.case(on.seeded.waiting), "")
        await until(on.pilot, lambda: "after the service is resumed" in shown(on))
        await on.client.resume()
        await until(on.pilot, lambda: "after the service is resumed" not in shown(on))
        assert "… more episodes" in shown(on)


async def test_the_last_look_offers_no_more(opened: Opened, control: Control) -> None:
    async with opened() as on:
        with write_session(control.store) as store:
            gate = latest_gate(store, on.seeded.waiting)
            assert gate is not None
            save_gate(store, replace(gate.result, rounds=3), cycle_id="c-0003", at=AT)
        await there(on)
        assert "More" not in shown(on).splitlines()[-1]
        assert "after round 3 of 3 (the last)" in shown(on)
        await on.pilot.press("m")
        assert isinstance(on.app.screen, Approvals)


async def test_the_cursor_says_whose_case_is_shown_and_stays(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("down")
        await until(on.pilot, lambda: "too little for what it costs" in shown(on))
        assert table(on, "adapters").selected == on.seeded.rejected
        assert "Approve " not in shown(on).splitlines()[-1]
        await on.pilot.press("a", "r", "m")
        assert isinstance(on.app.screen, Approvals)
        await on.client.pause("a look")
        await on.client.resume()
        await on.client.reject(on.seeded.waiting)
        await until(on.pilot, lambda: "! pending" not in shown(on))
        assert table(on, "adapters").selected == on.seeded.rejected
        await until(on.pilot, lambda: f"{on.seeded.rejected}  ✗ rejected by ada" in shown(on))


async def test_a_pair_is_read_and_left(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        await on.pilot.press("enter")
        assert on.app.focused is table(on, "pairs")
        await on.pilot.press("down", "enter")
        await until(on.pilot, lambda: isinstance(on.app.screen, SideBySide))
        case = await on.client.approvals.case(on.seeded.waiting)
        pair = case.harmed[1]
        assert shown(on).count(f"{pair.on}, task {pair.task_id} · done") == 2
        assert re.search(rf"(failure|success)   base .*(failure|success)   {on.seeded.waiting}", shown(on))
        first = on.app.focused
        await on.pilot.press("tab")
        assert on.app.focused is not first
        await on.pilot.press("q")
        await until(on.pilot, lambda: isinstance(on.app.screen, Approvals))
        assert table(on, "pairs").selected == f"{pair.base.id} {pair.adapter.id}"


async def test_overview_leads_to_the_case(opened: Opened) -> None:
    async with opened() as on:
        await until(on.pilot, lambda: on.seeded.waiting in shown(on))
        await on.pilot.press("enter")
        await until(on.pilot, lambda: f"{on.seeded.waiting}  ! decision pending" in shown(on))
        assert on.app.current_mode == "approvals"


@pytest.mark.parametrize("size", SIZES)
async def test_who_only_looks_is_offered_nothing(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size, read_only=True) as on:
        await there(on)
        await same_picture(on.app, "approvals-read-only")
        await on.pilot.press("a", "r", "m")
        assert isinstance(on.app.screen, Approvals)


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_to_decide_says_so(tmp_path: Path, size: tuple[int, int]) -> None:
    store = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), store, WrittenDown(), lambda: AT, AT, state="ready")  # type: ignore[arg-type]
    path = tmp_path / "traced.sock"
    async with served(control, path):
        app = TracedApp(Address(path))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.linked)
            await pilot.press(KEY)
            await until(pilot, lambda: "There are no adapters to decide" in text_of(app))
            await same_picture(app, "approvals-empty")
            await pilot.press("a", "r", "m", "enter")
            assert isinstance(app.screen, Approvals)
    store.dispose()


async def test_text_that_others_wrote_does_no_harm(opened: Opened, control: Control) -> None:
    bad = "[bold]x[/bold] \x1b[31m \u202edlrow \x00"
    with write_session(control.store) as store:
        row = update(CapabilityRow).where(CapabilityRow.name == "policy-checks")  # type: ignore[arg-type]
        store.execute(row.values(title=bad, description=bad * 50))
    async with opened((120, 40)) as on:
        await there(on)
        await until(on.pilot, lambda: "capability  [bold]x[/bold]" in shown(on))
        assert BIDI in shown(on)
        await on.client.reject(on.seeded.waiting, bad, actor=bad)
        await until(on.pilot, lambda: "✗ rejected by [bold]x[/bold] ␛[31m" in shown(on))
        assert not {"\x1b", "\u202e", "\x00"} & set(shown(on))


async def test_a_change_of_size_keeps_the_case_and_the_cursor(opened: Opened) -> None:
    async with opened((80, 24)) as on:
        await there(on)
        await on.pilot.press("down")
        await until(on.pilot, lambda: "rejected by ada" in shown(on))
        for size in ((200, 60), (120, 40), (80, 24)):
            await on.pilot.resize_terminal(*size)
            await on.pilot.pause()
            assert table(on, "adapters").selected == on.seeded.rejected
            assert "rejected by ada" in shown(on)
