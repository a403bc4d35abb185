"""What a decision on an adapter version stands on, and the episodes that its gate has compared."""

from fastapi import APIRouter

from store.database import reading
from store.repositories.approvals import list_judged
from traced.client.approvals import ApprovalView, Case, Episode
from traced.service import cases
from traced.service.control import Control
from traced.service.looks.paging import Limit


def router(control: Control) -> APIRouter:
    """Its paths."""
    router = APIRouter()

    @router.get("/approvals")
    def approvals(limit: Limit = 100) -> list[ApprovalView]:
        """Adapter versions that wait for a decision, then the others whose gate has answered, newest first."""
        with reading(control.store) as opened:
            return [cases.standing(one) for one in list_judged(opened, limit=limit)]

    @router.get("/adapters/{adapter}/case")
    def case(adapter: str) -> Case:
        """The whole case of one adapter version."""
        with reading(control.store) as opened:
            return cases.case(opened, adapter, control.settings)

    @router.get("/adapters/{adapter}/episodes/{trajectory_id:path}")
    def episode(adapter: str, trajectory_id: str) -> Episode:
        """One of the episodes that its gate has compared, with its messages."""
        with reading(control.store) as opened:
            return cases.episode(opened, adapter, trajectory_id)

    return router
