"""What is served: models and their traffic of late, the router, its decisions, one conversation."""

from typing import Annotated

from fastapi import APIRouter, Query

from store.database import reading
from store.repositories.adapters import fitting_cycles
from store.repositories.lately import decisions as newest_decisions
from store.repositories.lately import lately
from store.repositories.promotions import live_adapters
from store.repositories.traffic import get_conversation
from traced.client.serving import ConversationView, DecisionPage, Models, RouterView
from traced.outcomes.evidence import Labels
from traced.service import serving_views
from traced.service.control import Control
from traced.service.health import router_health
from traced.service.looks.paging import Limit
from traced.serving.fitted import decided_by
from traced.serving.spooled import spooled

Name = Annotated[str, Query(max_length=2000)]


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter(prefix="/serving")

    @router.get("/models")
    def models() -> Models:
        """Base and every version that is or was promoted, with the last day's traffic."""
        settings = control.settings
        labels = Labels(settings.serving.success_labels, settings.serving.failure_labels)
        with reading(control.store) as opened:
            return serving_views.models(opened, lately(opened, control.now()), settings.promotion, labels)

    @router.get("/router")
    def health() -> RouterView:
        """What the router says of itself, what waits in the spool, and who decides."""
        settings = control.settings
        with reading(control.store) as opened:
            live = [one.adapter for one in live_adapters(opened)]
            cycles = fitting_cycles(opened)
        waiting = spooled(settings.data_dir / "spool")
        return RouterView(
            **dict(router_health(settings.serving)),
            decided_by=decided_by(settings.data_dir, cycles, live, by_labels=settings.routing.router == "labels"),
            waiting_files=waiting.files,
            waiting_s=waiting.oldest_s,
            damaged=waiting.damaged,
        )

    @router.get("/decisions")
    def decisions(limit: Limit = 50, before: Name | None = None, model: Name = "") -> DecisionPage:
        """The newest decisions behind the cursor ``before`` of the page before."""
        with reading(control.store) as opened:
            page = newest_decisions(opened, limit=limit, before=before, model=model)
        return DecisionPage(decisions=[serving_views.decision(one) for one in page.decisions], next=page.next)

    @router.get("/conversation")
    def conversation(id: Name) -> ConversationView:
        """The conversation of this id, or in which an answer of this id was given."""
        with reading(control.store) as opened:
            return serving_views.conversation(get_conversation(opened, id))

    return router
