"""The approvals screen: the case, every key, and what is shown where nothing is or may be done."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update
from textual.events import Key
from textual.widgets import Button, Input

from benchmarks.seeded import Seeded
from store.database import open_store, sqlite_url, write_session
from store.records import Event
from store.repositories.events import save_event
from store.repositories.gates import latest_approval, latest_gate, save_gate
from store.repositories.trajectories import save_trajectories
from store.tables import CapabilityRow
from store.types import GateAnswer, Turn
from tests.integration.service.api_server import serve_api
from tests.integration.service.conftest import RecordingLoop
from tests.integration.tui.approving import KEY, open_approvals, publishable, screen_text
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import SIZES, same_picture, text_of, wait_until
from tests.unit.store.chain import trajectory
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


def table(tui: RunningApp, name: str) -> KeyedTable:
    return tui.app.screen.query_one(f"#{name}", KeyedTable)


async def test_a_confirmation_does_not_overtake_what_was_typed_before_it(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("a")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Decision) and tui.app.focused is not None)
        for sign in "reads well":
            tui.app.post_message(Key("space" if sign == " " else sign, sign))
        tui.app.post_message(Key("ctrl+y", None))
        await wait_until(tui.pilot, lambda: "✓ approved by" in screen_text(tui))
        [entry] = await tui.client.audit()
        assert entry.reason == "reads well"


@pytest.mark.parametrize("size", SIZES)
async def test_the_whole_case_is_on_one_screen(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size) as tui:
        await open_approvals(tui)
        await same_picture(tui.app, "approvals")
        await tui.pilot.press("a")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Decision))
        await same_picture(tui.app, "approvals-approve")
        await tui.pilot.press("escape", "enter", "enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, SideBySide))
        await same_picture(tui.app, "approvals-episodes")
        await tui.pilot.press("escape", "shift+tab", "end")
        await wait_until(tui.pilot, lambda: "decisions   none yet" in screen_text(tui))
        await same_picture(tui.app, "approvals-lineage")


async def test_an_adapter_is_approved_with_a_reason_and_by_the_chosen_way(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("a")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Decision))
        assert f"Approve {tui.seeded.waiting}" in screen_text(tui)
        await tui.pilot.press(*"reads well", "enter", "down", "space")
        assert isinstance(tui.app.screen, Decision), "Enter in the reason decides nothing"
        assert "▐●▌ canary" in screen_text(tui)
        await tui.pilot.press("ctrl+y")
        await wait_until(tui.pilot, lambda: "✓ approved by" in screen_text(tui))
        assert "canary" in screen_text(tui)
        status = await tui.client.status()
        assert status.waiting == []
        [adapter] = [adapter for adapter in status.adapters if adapter.name == tui.seeded.waiting]
        assert (adapter.decision, adapter.trial) == ("approved", "canary")
        [entry] = await tui.client.audit()
        assert (entry.action, entry.subject, entry.reason) == ("approve", tui.seeded.waiting, "reads well")


async def test_the_button_names_the_adapter_and_is_reached_by_tab_alone(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("r")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Decision))
        assert isinstance(tui.app.focused, Input)
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: tui.app.focused is tui.app.screen.query_one("#leave"))
        await tui.pilot.press("tab")
        await wait_until(tui.pilot, lambda: tui.app.focused is tui.app.screen.query_one("#confirm"))
        assert f"Reject {tui.seeded.waiting}" in str(tui.app.screen.query_one("#confirm", Button).label)
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: "✗ rejected by" in screen_text(tui))
        with write_session(tui.control.store) as session:
            approval = latest_approval(session, tui.seeded.waiting)
        assert approval is not None
        assert approval.decision == "rejected"


@pytest.mark.parametrize("leave", [("escape",), ("enter", "enter"), ("tab", "enter")])
async def test_leaving_decides_nothing(open_app: OpenApp, leave: tuple[str, ...]) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("r", *leave)
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Approvals))
        assert await tui.client.audit() == []


async def test_more_episodes_are_asked_for_and_only_rejecting_is_left_meanwhile(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("m")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Decision))
        assert "Promotion policy" not in screen_text(tui)
        await same_picture(tui.app, "approvals-more")
        await tui.pilot.press(*"too few", "ctrl+y")
        await wait_until(tui.pilot, lambda: "… more episodes, round 3 of 3, requested by" in screen_text(tui))

        def footer_keys() -> tuple[bool, ...]:
            footer = screen_text(tui).splitlines()[-1]
            return "Reject" in footer, "Approve " in footer, "More" in footer

        # The footer is drawn anew some time after the screen.
        await wait_until(tui.pilot, lambda: footer_keys() == (True, False, False))
        await tui.pilot.press("a", "m")
        assert isinstance(tui.app.screen, Approvals)
        [entry] = await tui.client.audit()
        assert (entry.action, entry.reason, entry.detail["look"]) == ("more-episodes", "too few", 3)
        with write_session(tui.control.store) as session:
            gate = latest_gate(session, tui.seeded.waiting)
            assert gate is not None
            newer = replace(gate.result, answer=GateAnswer.INCONCLUSIVE, rounds=3)
            save_gate(session, newer, cycle_id="c-0003", at=NOW)
            save_event(session, Event(NOW, "stage finished", "gate", "c-0003"))
        await wait_until(tui.pilot, lambda: "gate: inconclusive after round 3 of 3 (the last)" in screen_text(tui))
        assert "before:" in screen_text(tui)


async def test_a_paused_service_says_when_it_takes_the_look(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.client.pause("a test")
        await tui.client.approvals.more_episodes(await tui.client.approvals.case(tui.seeded.waiting), "")
        await wait_until(tui.pilot, lambda: "after the service is resumed" in screen_text(tui))
        await tui.client.resume()
        await wait_until(tui.pilot, lambda: "after the service is resumed" not in screen_text(tui))
        assert "… more episodes" in screen_text(tui)


async def test_the_last_look_offers_no_more(open_app: OpenApp, control: Control) -> None:
    async with open_app() as tui:
        with write_session(control.store) as session:
            gate = latest_gate(session, tui.seeded.waiting)
            assert gate is not None
            save_gate(session, replace(gate.result, rounds=3), cycle_id="c-0003", at=NOW)
        await open_approvals(tui)
        assert "More" not in screen_text(tui).splitlines()[-1]
        assert "after round 3 of 3 (the last)" in screen_text(tui)
        await tui.pilot.press("m")
        assert isinstance(tui.app.screen, Approvals)


async def test_the_cursor_says_whose_case_is_shown_and_stays(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: "too little for what it costs" in screen_text(tui))
        assert table(tui, "adapters").selected == tui.seeded.rejected
        assert "Approve " not in screen_text(tui).splitlines()[-1]
        await tui.pilot.press("a", "r", "m")
        assert isinstance(tui.app.screen, Approvals)
        await tui.client.pause("a look")
        await tui.client.resume()
        await tui.client.reject(tui.seeded.waiting)
        await wait_until(tui.pilot, lambda: "! pending" not in screen_text(tui))
        assert table(tui, "adapters").selected == tui.seeded.rejected
        await wait_until(tui.pilot, lambda: f"{tui.seeded.rejected}  ✗ rejected by ada" in screen_text(tui))


async def test_a_pair_is_read_and_left(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        await tui.pilot.press("enter")
        assert tui.app.focused is table(tui, "pairs")
        await tui.pilot.press("down", "enter")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, SideBySide))
        case = await tui.client.approvals.case(tui.seeded.waiting)
        pair = case.harmed[1]
        assert screen_text(tui).count(f"{pair.on}, task {pair.task_id} · done") == 2
        assert re.search(rf"(failure|success)   base .*(failure|success)   {tui.seeded.waiting}", screen_text(tui))
        first = tui.app.focused
        await tui.pilot.press("tab")
        assert tui.app.focused is not first
        await tui.pilot.press("q")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Approvals))
        assert table(tui, "pairs").selected == f"{pair.base.id} {pair.adapter.id}"


async def test_overview_leads_to_the_case(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await wait_until(tui.pilot, lambda: tui.seeded.waiting in screen_text(tui))
        await tui.pilot.press("enter")
        await wait_until(tui.pilot, lambda: f"{tui.seeded.waiting}  ! decision pending" in screen_text(tui))
        assert tui.app.current_mode == "approvals"


@pytest.mark.parametrize("size", SIZES)
async def test_who_only_looks_is_offered_nothing(open_app: OpenApp, size: tuple[int, int]) -> None:
    async with open_app(size, read_only=True) as tui:
        await open_approvals(tui)
        await same_picture(tui.app, "approvals-read-only")
        await tui.pilot.press("a", "r", "m")
        assert isinstance(tui.app.screen, Approvals)


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_to_decide_says_so(tmp_path: Path, size: tuple[int, int]) -> None:
    session = open_store(sqlite_url(tmp_path / "empty.db"))
    control = Control(load_settings(tmp_path), session, RecordingLoop(), lambda: NOW, NOW, state="ready")  # type: ignore[arg-type]
    path = tmp_path / "traced.sock"
    async with serve_api(control, path):
        app = TracedApp(Address(path))
        async with app.run_test(size=size) as pilot:
            await wait_until(pilot, lambda: app.linked)
            await pilot.press(KEY)
            await wait_until(pilot, lambda: "There are no adapters to decide" in text_of(app))
            await same_picture(app, "approvals-empty")
            await pilot.press("a", "r", "m", "enter")
            assert isinstance(app.screen, Approvals)
    session.dispose()


async def test_the_lengths_of_messages_are_shown(open_app: OpenApp, control: Control, seeded: Seeded) -> None:
    fields: dict[str, Any] = {"split": "gate", "cycle_id": "c-0003", "task_id": "a"}
    long = [Turn(2, [1], [7] * 9, [-0.5] * 9, "length")]
    with write_session(control.store) as session:
        rows = [trajectory("a-base", **fields), trajectory("a-new", model=seeded.waiting, turns=long, **fields)]
        save_trajectories(session, rows)
    async with open_app((120, 40)) as tui:
        await open_approvals(tui)
        await wait_until(tui.pilot, lambda: "messages     2 → 9 tokens on average, on the target" in screen_text(tui))


async def test_text_that_others_wrote_does_no_harm(open_app: OpenApp, control: Control) -> None:
    bad = "[bold]x[/bold] \x1b[31m \u202edlrow \x00"
    with write_session(control.store) as session:
        row = update(CapabilityRow).where(CapabilityRow.name == "policy-checks")  # type: ignore[arg-type]
        session.execute(row.values(title=bad, description=bad * 50))
    async with open_app((120, 40)) as tui:
        await open_approvals(tui)
        await wait_until(tui.pilot, lambda: "capability  [bold]x[/bold]" in screen_text(tui))
        assert BIDI in screen_text(tui)
        await tui.client.reject(tui.seeded.waiting, bad, actor=bad)
        await wait_until(tui.pilot, lambda: ", on behalf of [bold]x[/bold] ␛[31m" in screen_text(tui))
        assert not {"\x1b", "\u202e", "\x00"} & set(screen_text(tui))


async def test_a_change_of_size_keeps_the_case_and_the_cursor(open_app: OpenApp) -> None:
    async with open_app((80, 24)) as tui:
        await open_approvals(tui)
        await tui.pilot.press("down")
        await wait_until(tui.pilot, lambda: "rejected by ada" in screen_text(tui))
        for size in ((200, 60), (120, 40), (80, 24)):
            await tui.pilot.resize_terminal(*size)
            await tui.pilot.pause()
            assert table(tui, "adapters").selected == tui.seeded.rejected
            assert "rejected by ada" in screen_text(tui)
