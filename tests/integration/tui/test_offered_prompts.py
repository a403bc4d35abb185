"""Prompts that are enough, on the approvals screen: who is offered what, and its text."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from store.database import write_session
from store.records import PromptPatch
from store.repositories.llm_replies import save_patch
from tests.integration.tui.approving import KEY, open_approvals, screen_text
from tests.integration.tui.conftest import NOW, OpenApp, RunningApp
from tests.integration.tui.screens import wait_until
from tests.unit.store.chain import FIXING
from traced.core.ownership import this_user
from tui.screens.approvals import Approvals, Patches

FIXED = "✓ a prompt is enough for policy-checks: 25 % → 100 % in its environment"


def add_patch(tui: RunningApp, **fields: Any) -> PromptPatch:
    patch = replace(FIXING, cycle_id="c-0003", capability="policy-checks", at=NOW, **fields)
    with write_session(tui.control.store) as session:
        save_patch(session, patch)
    return patch


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_a_prompt_that_is_enough_stands_above_the_adapters_and_is_read_with_its_gates(
    open_app: OpenApp, size: tuple[int, int]
) -> None:
    async with open_app(size) as tui:
        patch = add_patch(tui, text="Check the [bold]policy[/] first.\x1b[2J")
        await open_approvals(tui)
        assert FIXED in screen_text(tui)
        await tui.pilot.press("p")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Patches))
        text = screen_text(tui)
        assert "Check the [bold]policy[/] first." in text
        assert "prompt against base: pass" in text
        assert "environment  25 % → 100 %, +75.0 points [+50.0, +90.0] on 24 seeds" in text
        assert f"traced show patch {patch.id[:12]} --into FILE" in text
        await tui.pilot.press("escape")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Approvals))


async def test_who_took_a_prompt_and_why_stands_with_it_and_others_decisions_come_at_once(open_app: OpenApp) -> None:
    async with open_app((200, 60)) as tui:
        patch = add_patch(tui)
        await open_approvals(tui)
        assert "approved by" not in screen_text(tui)
        await tui.client.prompts.approve(patch.id[:12], "it [bold]reads[/] well", "ann\x1b[2J")
        await wait_until(
            tui.pilot, lambda: f"instead of an adapter; approved by {this_user()}, on behalf of ann" in screen_text(tui)
        )
        await tui.pilot.press("p")
        await wait_until(tui.pilot, lambda: isinstance(tui.app.screen, Patches))
        assert ": it [bold]reads[/] well" in screen_text(tui)
        assert "To record a decision" not in screen_text(tui)


async def test_what_was_found_last_counts_and_without_an_offer_there_is_no_line_and_no_key(open_app: OpenApp) -> None:
    async with open_app() as tui:
        add_patch(tui)
        later = replace(FIXING, text="Other.", figures={"enough": "neither"}, cycle_id="c-0003")
        with write_session(tui.control.store) as session:
            save_patch(session, replace(later, capability="policy-checks", at=NOW + timedelta(hours=1)))
        await open_approvals(tui)
        assert "a prompt is enough" not in screen_text(tui)
        assert "Read prompts" not in screen_text(tui)
        await tui.pilot.press("p", KEY)
        assert isinstance(tui.app.screen, Approvals)
