"""Prompt patches that were evolved, with what the gates say of them and their texts."""

from dataclasses import asdict

from fastapi import APIRouter

from store.database import reading
from store.records import PromptPatch
from store.repositories.llm_replies import list_patches
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.approvals import PatchGateView, PatchView
from traced.prompt_optimization.patches import enough, gates, newest, offered
from traced.registry.decisions import PromptDecision, prompt_decisions


def router(control: Control) -> APIRouter:
    """Its path."""
    router = APIRouter()

    @router.get("/prompts")
    def prompts(limit: Limit = 100) -> list[PatchView]:
        """The newest patch of each cycle's capability, newest first."""
        with reading(control.store) as opened:
            found, decided = newest(list_patches(opened)), prompt_decisions(opened)
        return [_view(one, decided.get(one.id)) for one in sorted(found, key=lambda one: one.at, reverse=True)[:limit]]

    return router


def _view(one: PromptPatch, decided: PromptDecision | None) -> PatchView:
    told = [{"of": of, **asdict(result)} for of, result in gates(one).items()]
    return PatchView(
        id=one.id,
        cycle_id=one.cycle_id,
        capability=one.capability,
        enough=enough(one),
        fixes=bool(offered([one])),
        text=one.text,
        gates=[PatchGateView.model_validate(each) for each in told],
        at=one.at,
        decision=decided.decision.value if decided else "none",
        decided_by=decided.who if decided else "",
        decided_at=decided.at if decided else None,
        reason=decided.reason if decided else "",
    )
