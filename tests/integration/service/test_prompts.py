"""Prompt patches over the control API."""

from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

from store.database import write_session
from store.repositories.llm_replies import save_patch
from tests.integration.service.served import READER, on_tcp, refused, served
from tests.unit.store.chain import CAPABILITY, CYCLE, FIXING, PATCH
from traced.api.control import Control


async def test_the_newest_patch_of_each_cycles_capability_is_told_with_its_gates_and_text(
    control: Control, path: Path
) -> None:
    with write_session(control.store) as opened:
        older = replace(FIXING, cycle_id=CYCLE.id, capability=CAPABILITY.name, at=PATCH.at + timedelta(hours=1))
        save_patch(opened, older)
        save_patch(opened, replace(older, text="Better.", at=PATCH.at + timedelta(hours=2)))
    async with served(control, path) as client:
        [told] = await client.prompts.list()
        assert (told.cycle_id, told.capability, told.text) == (CYCLE.id, CAPABILITY.name, "Better.")
        assert (told.enough, told.fixes) == ("a prompt is enough", True)
        [gate] = told.gates
        assert (gate.of, gate.answer, gate.rounds) == ("prompt", "pass", 1)
        assert [(one.name, one.base, one.adapter, one.seeds) for one in gate.comparisons] == [
            ("environment", 0.25, 1.0, 24)
        ]

        assert (told.decision, told.decided_at) == ("none", None)
        done = await client.prompts.approve(told.id[:12], "it reads well", "ann")
        assert (done.subject, done.detail["decision"]["who"]) == (told.id, "ann")
        [decided] = await client.prompts.list()
        assert (decided.decision, decided.decided_by, decided.reason) == ("approved", "ann", "it reads well")
        assert decided.decided_at is not None
        [entry] = [one for one in await client.audit() if one.action == "approve-prompt"]
        assert (entry.who, entry.subject, entry.detail["text"]) == ("ann", told.id, "Better.")
        await client.prompts.reject(told.id, "no")
        assert [one.decision for one in await client.prompts.list()] == ["rejected"]
        assert "no prompt patch" in (await refused(client.prompts.approve("ffffff"))).message


async def test_who_may_only_look_decides_on_no_prompt(control: Control) -> None:
    with write_session(control.store) as opened:
        key = save_patch(opened, replace(FIXING, cycle_id=CYCLE.id, capability=CAPABILITY.name))
    async with on_tcp(control, READER) as client:
        assert (await refused(client.prompts.approve(key))).status == HTTPStatus.FORBIDDEN
        assert [one.decision for one in await client.prompts.list()] == ["none"]
