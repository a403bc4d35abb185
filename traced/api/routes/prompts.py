"""Routes for prompt patches with their gate results."""

from dataclasses import asdict

from fastapi import APIRouter

from store.database import read_session
from store.records import PromptPatch
from store.repositories.llm_replies import list_patches
from traced.api.control import Control
from traced.api.queries import Limit
from traced.client.approvals import PatchGateView, PatchView
from traced.prompt_optimization.patches import gates, newest_patches, remedy_text, sufficient_patches
from traced.registry.decisions import PromptDecision, prompt_decisions


def router(control: Control) -> APIRouter:
    """Build the route."""
    router = APIRouter()

    @router.get("/prompts")
    def prompts(limit: Limit = 100) -> list[PatchView]:
        """The newest prompt patch per cycle and capability, newest first."""
        with read_session(control.store) as session:
            patches, decisions = newest_patches(list_patches(session)), prompt_decisions(session)
        return [
            _view(patch, decisions.get(patch.id))
            for patch in sorted(patches, key=lambda patch: patch.at, reverse=True)[:limit]
        ]

    return router


def _view(patch: PromptPatch, decision: PromptDecision | None) -> PatchView:
    results = [{"of": subject, **asdict(result)} for subject, result in gates(patch).items()]
    return PatchView(
        id=patch.id,
        cycle_id=patch.cycle_id,
        capability=patch.capability,
        enough=remedy_text(patch),
        fixes=bool(sufficient_patches([patch])),
        text=patch.text,
        gates=[PatchGateView.model_validate(result) for result in results],
        at=patch.at,
        decision=decision.decision.value if decision else "none",
        decided_by=decision.who if decision else "",
        decided_at=decision.at if decision else None,
        reason=decision.reason if decision else "",
        tag=decision.tag if decision else "",
    )
