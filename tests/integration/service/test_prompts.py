"""Prompt patches over the control API."""

from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

from store.database import write_session
from store.repositories.llm_replies import save_patch
from tests.integration.service.api_server import READER, expect_refusal, on_tcp, serve_api
from tests.unit.store.chain import CAPABILITY, CYCLE, FIXING, PATCH
from traced.api.control import Control
from traced.core.ownership import this_user


async def test_the_newest_patch_of_each_cycles_capability_is_told_with_its_gates_and_text(
    control: Control, path: Path
) -> None:
    with write_session(control.store) as session:
        older = replace(FIXING, cycle_id=CYCLE.id, capability=CAPABILITY.name, at=PATCH.at + timedelta(hours=1))
        save_patch(session, older)
        save_patch(session, replace(older, text="Better.", at=PATCH.at + timedelta(hours=2)))
    async with serve_api(control, path) as client:
        [pending] = await client.prompts.list()
        assert (pending.cycle_id, pending.capability, pending.text) == (CYCLE.id, CAPABILITY.name, "Better.")
        assert (pending.enough, pending.fixes) == ("a prompt is enough", True)
        [gate] = pending.gates
        assert (gate.of, gate.answer, gate.rounds) == ("prompt", "pass", 1)
        assert [
            (comparison.name, comparison.base, comparison.adapter, comparison.seeds) for comparison in gate.comparisons
        ] == [("environment", 0.25, 1.0, 24)]

        assert (pending.decision, pending.decided_at) == ("none", None)
        done = await client.prompts.approve(pending.id[:12], "it reads well", "ann")
        person, signature = this_user(), f"{this_user()}, on behalf of ann"
        assert (done.subject, done.detail["decision"]["who"]) == (pending.id, signature)
        [approved] = await client.prompts.list()
        assert (approved.decision, approved.decided_by, approved.reason) == ("approved", signature, "it reads well")
        assert approved.decided_at is not None
        [entry] = [entry for entry in await client.audit() if entry.action == "approve-prompt"]
        assert (entry.who, entry.subject, entry.detail["text"]) == (person, pending.id, "Better.")
        assert approved.tag in (await expect_refusal(client.prompts.reject(pending.id, "no"))).hint
        await client.prompts.reject(pending.id, "no", tag=approved.tag)
        assert [patch.decision for patch in await client.prompts.list()] == ["rejected"]
        assert "no prompt patch" in (await expect_refusal(client.prompts.approve("ffffff"))).message


async def test_who_may_only_look_decides_on_no_prompt(control: Control) -> None:
    with write_session(control.store) as session:
        key = save_patch(session, replace(FIXING, cycle_id=CYCLE.id, capability=CAPABILITY.name))
    async with on_tcp(control, READER) as client:
        assert (await expect_refusal(client.prompts.approve(key))).status == HTTPStatus.FORBIDDEN
        assert [patch.decision for patch in await client.prompts.list()] == ["none"]
