"""Decisions beside others': who was first, what a daemon refuses, and one that is away while a decision is made."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from textual.widgets import Button, Input

from tests.integration.service.api_server import serve_api
from tests.integration.tui.approving import KEY, open_approvals, publishable, screen_text
from tests.integration.tui.conftest import OpenApp, RunningApp
from tests.integration.tui.screens import USUAL, text_of, wait_until
from traced.api.control import Control
from traced.core.ownership import this_user
from tui.app import TracedApp
from tui.connection import Address
from tui.screens.approvals import Approvals
from tui.screens.decision import Decision


@pytest.fixture
def control(tmp_path: Path, control: Control) -> Control:
    return publishable(tmp_path, control)


async def test_who_looks_is_told_of_the_others_decision(open_app: OpenApp) -> None:
    async with open_app() as tui:
        tui.app._disable_notifications = False
        await open_approvals(tui)
        case = await tui.client.approvals.case(tui.seeded.waiting)
        await tui.client.approvals.reject(case, "harms refunds")
        await wait_until(tui.pilot, lambda: "✗ rejected by" in screen_text(tui))
        await wait_until(tui.pilot, lambda: "Decided by somebody else" in screen_text(tui))
        assert "harms refunds" in screen_text(tui)
        assert "Approve " not in screen_text(tui).splitlines()[-1]


def typed_reason(tui: RunningApp) -> str:
    """Return the reason typed into the dialog."""
    return tui.app.screen.query_one("#why", Input).value


async def test_who_comes_second_in_the_dialog_is_told_who_was_first(open_app: OpenApp) -> None:
    async with open_app() as tui:
        await open_approvals(tui)
        case = await tui.client.approvals.case(tui.seeded.waiting)
        await tui.pilot.press("a", *"fine")
        await tui.client.reject(case.adapter.name, "harms refunds", actor="ada")
        await wait_until(tui.pilot, lambda: f"on behalf of ada rejected {tui.seeded.waiting}" in screen_text(tui))
        await tui.pilot.press("ctrl+y")
        assert isinstance(tui.app.screen, Decision), "nothing is left to confirm"
        assert tui.app.screen.query_one("#confirm", Button).disabled
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: f"✗ rejected by {this_user()}, on behalf of ada" in screen_text(tui))
        assert [entry.action for entry in await tui.client.audit()] == ["reject"]


async def test_a_decision_that_the_daemon_refuses_says_who_was_first(open_app: OpenApp) -> None:
    async with open_app() as tui:
        tui.app._disable_notifications = False
        await open_approvals(tui)
        screen = tui.app.screen
        assert isinstance(screen, Approvals)
        screen.news = lambda events: None  # type: ignore[method-assign]  # the news is still on its way
        await tui.pilot.press("a", *"fine")
        await tui.client.reject(tui.seeded.waiting, "harms refunds", actor="ada")
        await tui.pilot.press("ctrl+y")
        await wait_until(tui.pilot, lambda: "✗ policy-checks@v1 has changed since:" in screen_text(tui))
        assert typed_reason(tui) == "fine"
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: f"✗ rejected by {this_user()}, on behalf of ada" in screen_text(tui))


async def test_a_decision_that_is_not_answered_keeps_its_text_and_is_made_at_the_next_try(
    tmp_path: Path, control: Control
) -> None:
    path = tmp_path / "traced.sock"
    app = TracedApp(Address(path))
    async with AsyncExitStack() as exit_stack, app.run_test(size=USUAL) as pilot:
        await exit_stack.enter_async_context(serve_api(control, path))
        await pilot.press(KEY)
        await wait_until(pilot, lambda: "a Approve" in text_of(app))
        await pilot.press("a", *"fine")
        await exit_stack.aclose()
        await pilot.press("ctrl+y")
        await wait_until(pilot, lambda: "✗ no daemon answers" in text_of(app))
        async with serve_api(control, path) as client:
            assert await client.audit() == []
            await wait_until(pilot, lambda: app.linked)
            await pilot.press("ctrl+y")
            await wait_until(pilot, lambda: isinstance(app.screen, Approvals))
            assert [(entry.action, entry.reason) for entry in await client.audit()] == [("approve", "fine")]
