"""Prompt patches: what a text at the end of the system prompt does for a capability, beside or instead of an adapter.

Invariants: as ``traced.client.models``; rates lie in 0-1. In a comparison ``base`` is who was there before and
``adapter`` who came after: base and prompt, base and adapter, adapter and prompt.
"""

from datetime import datetime
from typing import Literal

from pydantic import Field

from traced.client.approvals import Answer, ComparisonView
from traced.client.models import Done, Model, Reason
from traced.client.transport import Transport, part


class PatchGateView(Model):
    """What one gate said: of the prompt, of the adapter, or between the two."""

    adapter: str = Field(description="who came after, as its episodes name it")
    of: Literal["prompt", "adapter", "comparison"]
    answer: Answer
    rounds: int
    comparisons: list[ComparisonView]


class PatchView(Model):
    """The newest prompt patch of a cycle's capability."""

    id: str
    cycle_id: str
    capability: str
    enough: str = Field(description="which is enough, in words")
    fixes: bool = Field(description="whether the prompt is")
    text: str
    gates: list[PatchGateView]
    at: datetime
    decision: Literal["none", "approved", "rejected"] = "none"
    decided_by: str = ""
    decided_at: datetime | None = None
    reason: str = Field(default="", description="of the decision")


class Prompts:
    """The calls."""

    def __init__(self, daemon: Transport) -> None:
        self._daemon = daemon

    async def list(self, limit: int = 100) -> list[PatchView]:
        """The newest patch of each cycle's capability, newest first."""
        return await self._daemon.list("/prompts", PatchView, limit=limit)

    async def approve(self, patch: str, reason: str = "", who: str = "") -> Done:
        """Take a prompt (the first digits of its id) that is enough; ``who`` decides, if not the one who asks."""
        return await self._daemon.post(f"/prompts/{part(patch)}/approve", Reason(reason=reason, who=who))

    async def reject(self, patch: str, reason: str = "", who: str = "") -> Done:
        """Decide against a prompt."""
        return await self._daemon.post(f"/prompts/{part(patch)}/reject", Reason(reason=reason, who=who))
