"""Prompts that are enough, on the approvals screen: who is offered what, and its text."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from store.database import write_session
from store.records import PromptPatch
from store.repositories.llm_replies import save_patch
from tests.integration.tui.approving import KEY, shown, there
from tests.integration.tui.conftest import AT, Opened, Running
from tests.integration.tui.screens import until
from tests.unit.store.chain import FIXING
from tui.screens.approvals import Approvals, Patches

FIXED = "✓ a prompt is enough for policy-checks: 25 % → 100 % in its environment"


def save(on: Running, **changed: Any) -> PromptPatch:
    patch = replace(FIXING, cycle_id="c-0003", capability="policy-checks", at=AT, **changed)
    with write_session(on.control.store) as store:
        save_patch(store, patch)
    return patch


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_a_prompt_that_is_enough_stands_above_the_adapters_and_is_read_with_its_gates(
    opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(size) as on:
        patch = save(on, text="Check the [bold]policy[/] first.\x1b[2J")
        await there(on)
        assert FIXED in shown(on)
        await on.pilot.press("p")
        await until(on.pilot, lambda: isinstance(on.app.screen, Patches))
        text = shown(on)
        assert "Check the [bold]policy[/] first." in text
        assert "prompt against base: pass" in text
        assert "environment  25 % → 100 %, +75.0 points [+50.0, +90.0] on 24 seeds" in text
        assert f"traced show patch {patch.id[:12]} --into FILE" in text
        await on.pilot.press("escape")
        await until(on.pilot, lambda: isinstance(on.app.screen, Approvals))


async def test_who_took_a_prompt_and_why_stands_with_it_and_others_decisions_come_at_once(opened: Opened) -> None:
    async with opened((200, 60)) as on:
        patch = save(on)
        await there(on)
        assert "approved by" not in shown(on)
        await on.client.prompts.approve(patch.id[:12], "it [bold]reads[/] well", "ann\x1b[2J")
        await until(on.pilot, lambda: "instead of an adapter; approved by ann" in shown(on))
        await on.pilot.press("p")
        await until(on.pilot, lambda: isinstance(on.app.screen, Patches))
        assert ": it [bold]reads[/] well" in shown(on)
        assert "To record a decision" not in shown(on)


async def test_what_was_found_last_counts_and_without_an_offer_there_is_no_line_and_no_key(opened: Opened) -> None:
    async with opened() as on:
        save(on)
        later = replace(FIXING, text="Other.", figures={"enough": "neither"}, cycle_id="c-0003")
        with write_session(on.control.store) as store:
            save_patch(store, replace(later, capability="policy-checks", at=AT + timedelta(hours=1)))
        await there(on)
        assert "a prompt is enough" not in shown(on)
        assert "Read prompts" not in shown(on)
        await on.pilot.press("p", KEY)
        assert isinstance(on.app.screen, Approvals)
