"""What people decide on prompt patches: who took one into their agent's prompt, or did not want it, when and why.

Invariants: only a patch that is offered can be approved; what was decided is an entry of the audit with the cycle, the
capability and the text, so that it outlives the cycle's own rows; the newest decision on a patch counts, and repeating
it changes nothing: what was said first stands. How it fails: ``PromotionError``, and ``TracedError`` for an unknown id.
Not covered: whether the agent has the text; nothing of traced serves it.
"""

from dataclasses import dataclass
from datetime import datetime

from sqlmodel import Session

from store.plain import line
from store.records import Decision, PromptPatch
from store.repositories.audit import newest_of
from store.repositories.thinking import hold_patch, list_patches
from traced.gates.errors import PromotionError
from traced.prompting.patches import SHORT, enough, named, offered

APPROVE, REJECT = "approve-prompt", "reject-prompt"  # actions of the audit
DECISIONS = {APPROVE: Decision.APPROVED, REJECT: Decision.REJECTED}


@dataclass(frozen=True)
class PromptDecision:
    """A person's decision on the patch of this id."""

    patch: str
    decision: Decision
    who: str
    at: datetime
    reason: str = ""

    def __str__(self) -> str:
        because = f", because {line(self.reason)}" if self.reason else ""
        return f"{self.decision.value} by {line(self.who)} on {self.at:%Y-%m-%d at %H:%M} UTC{because}"


def decisions(session: Session) -> dict[str, PromptDecision]:
    """The decision that counts on each patch, by the patch's id."""
    newest = newest_of(session, DECISIONS)
    return {key: PromptDecision(key, DECISIONS[one.action], one.who, one.at, one.reason) for key, one in newest.items()}


def to_decide(session: Session, digits: str, decision: Decision) -> tuple[PromptPatch, PromptDecision | None]:
    """The patch, held, whose id begins so, and the decision that counts.

    Raises PromotionError for the approval of one that is not offered, unless it was approved while it was.
    """
    patch = named(session, digits)
    hold_patch(session, patch.id)
    counts = decisions(session).get(patch.id)
    if counts is not None and counts.decision is decision:
        return patch, counts
    of_this = offered(list_patches(session, cycle_id=patch.cycle_id, capability=patch.capability))
    if decision is Decision.APPROVED and patch.id not in [one.id for one in of_this]:
        newer = f", and {of_this[0].id[:SHORT]} is newer" if of_this else ""
        raise PromotionError(
            f"patch {patch.id[:SHORT]} of {patch.capability} cannot be approved: {enough(patch)}{newer}",
            hint=f"traced show patch {(of_this[0] if of_this else patch).id[:SHORT]}",
        )
    return patch, counts
