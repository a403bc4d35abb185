"""Decisions beside others': who was first, what a daemon refuses, and one that is away while a decision is made."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from textual.widgets import Button, Input

from tests.integration.service.served import served
from tests.integration.tui.approving import KEY, publishable, shown, there
from tests.integration.tui.conftest import Opened, Running
from tests.integration.tui.screens import USUAL, text_of, until
from traced.api.control import Control
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.approvals import Approvals
from tui.screens.decision import Decision


@pytest.fixture
def control(tmp_path: Path, control: Control) -> Control:
    return publishable(tmp_path, control)


async def test_who_looks_is_told_of_the_others_decision(opened: Opened) -> None:
    async with opened() as on:
        on.app._disable_notifications = False
        await there(on)
        case = await on.client.approvals.case(on.seeded.waiting)
        await on.client.approvals.reject(case, "harms refunds")
        await until(on.pilot, lambda: "✗ rejected by" in shown(on))
        await until(on.pilot, lambda: "Decided by somebody else" in shown(on))
        assert "harms refunds" in shown(on)
        assert "Approve " not in shown(on).splitlines()[-1]


def typed(on: Running) -> str:
    """The reason in the dialog."""
    return on.app.screen.query_one("#why", Input).value


async def test_who_comes_second_in_the_dialog_is_told_who_was_first(opened: Opened) -> None:
    async with opened() as on:
        await there(on)
        case = await on.client.approvals.case(on.seeded.waiting)
        await on.pilot.press("a", *"fine")
        await on.client.reject(case.adapter.name, "harms refunds", actor="ada")
        await until(on.pilot, lambda: f"✗ ada rejected {on.seeded.waiting}: harms refunds" in shown(on))
        await on.pilot.press("ctrl+y")
        assert isinstance(on.app.screen, Decision), "nothing is left to confirm"
        assert on.app.screen.query_one("#confirm", Button).disabled
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "✗ rejected by ada" in shown(on))
        assert [one.action for one in await on.client.audit()] == ["reject"]


async def test_a_decision_that_the_daemon_refuses_says_who_was_first(opened: Opened) -> None:
    async with opened() as on:
        on.app._disable_notifications = False
        await there(on)
        screen = on.app.screen
        assert isinstance(screen, Approvals)
        screen.news = lambda events: None  # type: ignore[method-assign]  # the news is still on its way
        await on.pilot.press("a", *"fine")
        await on.client.reject(on.seeded.waiting, "harms refunds", actor="ada")
        await on.pilot.press("ctrl+y")
        await until(on.pilot, lambda: "✗ already decided: ada rejected" in shown(on))
        assert typed(on) == "fine"
        await on.pilot.press("escape")
        await until(on.pilot, lambda: "✗ rejected by ada" in shown(on))


async def test_a_decision_that_is_not_answered_keeps_its_text_and_is_made_at_the_next_try(
    tmp_path: Path, control: Control
) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with AsyncExitStack() as first, app.run_test(size=USUAL) as pilot:
        await first.enter_async_context(served(control, path))
        await pilot.press(KEY)
        await until(pilot, lambda: "a Approve" in text_of(app))
        await pilot.press("a", *"fine")
        await first.aclose()
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "✗ no daemon answers" in text_of(app))
        async with served(control, path) as client:
            assert await client.audit() == []
            await until(pilot, lambda: app.linked)
            await pilot.press("ctrl+y")
            await until(pilot, lambda: isinstance(app.screen, Approvals))
            assert [(one.action, one.reason) for one in await client.audit()] == [("approve", "fine")]
