"""Stored prompt patches, and the remedy that their gates decide on: the prompt, the adapter, or neither.

    prompt       the incumbent with the patch against the incumbent: the gate, as it judges an adapter
    adapter      the incumbent with the adapter against the incumbent: the adapter's own gate
    comparison   the incumbent with the patch against the incumbent with the adapter, on the same seeds: no loss beyond
                 the gate's margin for regression tasks, in any comparison (``no_worse``)

Without live adapters the incumbent is the base model, and the incumbent with an adapter is the adapter alone.

A prompt suffices if it passes its gate and the adapter does not, or is not better by more than that margin. The adapter
is needed if it passes and the prompt fails, or is worse by more than the margin. An interval that contains the margin
decides nothing: a small sample cannot decide, and more episodes can turn inconclusive into an answer. Of a cycle's
capability only the newest patch counts.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from sqlmodel import Session

from store.records import PromptPatch
from store.repositories.llm_replies import list_patches
from store.types import GateAnswer, GateResult, PairedDifference
from traced.core.errors import TracedError

if TYPE_CHECKING:
    from traced.evaluation.gate import GatePolicy


PASS, FAIL = GateAnswer.PASS, GateAnswer.FAIL
SHORT_ID_DIGITS = 12  # hex digits of an id shown to people
NOT_COMPARED = "not compared"


class Remedy(StrEnum):
    """What fixes a capability."""

    PROMPT = "a prompt is enough"
    ADAPTER = "the adapter is needed"
    NO_REMEDY = "neither"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Gates:
    """The gates' results; None for an adapter that does not exist or whose gate has no answer."""

    prompt: GateResult
    adapter: GateResult | None = None
    comparison: GateResult | None = None

    @property
    def remedy(self) -> Remedy:
        """Return the remedy that follows from the three answers."""
        return remedy_of(
            self.prompt.answer,
            self.adapter.answer if self.adapter else None,
            self.comparison.answer if self.comparison else None,
        )


def remedy_of(prompt: GateAnswer, adapter: GateAnswer | None, comparison: GateAnswer | None) -> Remedy:
    """Return the remedy that follows from the answers of the three gates."""
    if adapter is PASS and FAIL in (prompt, comparison):
        return Remedy.ADAPTER
    if prompt is PASS and (adapter is not PASS or comparison is PASS):
        return Remedy.PROMPT
    return Remedy.NO_REMEDY if prompt is FAIL and adapter in (FAIL, None) else Remedy.INCONCLUSIVE


def no_worse(policy: "GatePolicy") -> "GatePolicy":
    """Return the gate policy for a non-inferiority comparison: no loss beyond ``regression_margin`` anywhere."""
    margin = policy.regression_margin
    return dataclasses.replace(policy, environment_margin=-margin, target_margin=-margin)


def remedy_text(patch: PromptPatch) -> str:
    """Return which remedy a patch's gates found, in words."""
    return str(patch.figures.get("enough", NOT_COMPARED))


def newest_patches(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """Return the newest patch of each cycle's capability; ``patches`` come oldest first."""
    return list({(patch.cycle_id, patch.capability): patch for patch in patches}.values())


def sufficient_patches(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """Return the newest patches that fix their capability."""
    return [patch for patch in newest_patches(patches) if remedy_text(patch) == Remedy.PROMPT]


def gates(patch: PromptPatch) -> dict[str, GateResult]:
    """Return a patch's stored gate results by comparison: "prompt", "adapter", "comparison"."""
    results: dict[str, GateResult] = {}
    for name, gate in patch.figures.get("gates", {}).items():
        comparisons = [
            PairedDifference(**fields | {"answer": GateAnswer(fields["answer"])}) for fields in gate["comparisons"]
        ]
        results[name] = GateResult(gate["adapter"], GateAnswer(gate["answer"]), comparisons, gate["rounds"])
    return results


def find_patch(session: Session, digits: str) -> PromptPatch:
    """Return the patch whose id begins with these digits; raises ``TracedError``."""
    patches: Sequence[PromptPatch] = [patch for patch in list_patches(session) if patch.id.startswith(digits.lower())]
    if not patches:
        raise TracedError(f"no prompt patch has an id that begins with {digits!r}", hint="traced prompts")
    if len(patches) > 1:
        candidates = ", ".join(patch.id[:SHORT_ID_DIGITS] for patch in patches[:3])
        raise TracedError(
            f"{len(patches)} prompt patches have ids that begin with {digits!r}", hint=f"one of: {candidates}"
        )
    return patches[0]


def skip_reason(patch: PromptPatch) -> str:
    """Return why no adapter is trained for the patch's capability; "" if one has to be."""
    if patch.figures["enough"] != Remedy.PROMPT:
        return ""
    return f"{Remedy.PROMPT}: traced show patch {patch.id[:12]}"
