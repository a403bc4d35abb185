"""Prompt patches as the store keeps them: which are offered, what their gates found, and one by its first digits.

Invariant: of a cycle's capability the newest patch counts, whatever an earlier one said. How it fails: ``TracedError``
names the command that lists them.

Which is enough, a prompt or an adapter: what the gates say together, with no statistics of its own.

    prompt       base with patch against base: the gate, as it judges an adapter
    adapter      the adapter against base: its own gate
    comparison   base with patch against the adapter, on the same seeds: not worse by more than the gate's margin for
                 untouched tasks, in every comparison (``no_worse``); asked where both passed

A prompt is enough where it passes its gate and the adapter does not, or is not better by more than that margin. The
adapter is needed where it passes its gate and the prompt fails its own, or is worse than the adapter by more than the
margin. Neither is, where none of them can pass any more. Everything else is inconclusive. Intervals that hold the
margin decide nothing, so more episodes can turn inconclusive into an answer, and a small sample cannot buy one.
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


class Enough(StrEnum):
    """What a capability takes."""

    PROMPT = "a prompt is enough"
    ADAPTER = "the adapter is needed"
    NEITHER = "neither"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Gates:
    """The gates' results; None for an adapter that there is not, or whose gate has not answered."""

    prompt: GateResult
    adapter: GateResult | None = None
    comparison: GateResult | None = None

    @property
    def enough(self) -> Enough:
        """What they say together."""
        return which(
            self.prompt.answer,
            self.adapter.answer if self.adapter else None,
            self.comparison.answer if self.comparison else None,
        )


def which(prompt: GateAnswer, adapter: GateAnswer | None, comparison: GateAnswer | None) -> Enough:
    """What three answers say together."""
    if adapter is PASS and FAIL in (prompt, comparison):
        return Enough.ADAPTER
    if prompt is PASS and (adapter is not PASS or comparison is PASS):
        return Enough.PROMPT
    return Enough.NEITHER if prompt is FAIL and adapter in (FAIL, None) else Enough.INCONCLUSIVE


def no_worse(policy: "GatePolicy") -> "GatePolicy":
    """The gate's policy for a rival that need not be better: no loss beyond ``untouched_margin`` anywhere."""
    margin = policy.untouched_margin
    return dataclasses.replace(policy, environment_margin=-margin, target_margin=-margin)


SHORT = 12  # hex digits of an id that a person is shown
NOT_COMPARED = "not compared"


def enough(patch: PromptPatch) -> str:
    """Which is enough, in words."""
    return str(patch.figures.get("enough", NOT_COMPARED))


def newest(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """The newest of each cycle's capability; ``patches`` come oldest first."""
    return list({(one.cycle_id, one.capability): one for one in patches}.values())


def offered(patches: Iterable[PromptPatch]) -> list[PromptPatch]:
    """Those that fix their capability."""
    return [one for one in newest(patches) if enough(one) == Enough.PROMPT]


def gates(patch: PromptPatch) -> dict[str, GateResult]:
    """The gates' results by what was compared: "prompt", "adapter", "comparison"; as ``enough.Gates`` names them."""
    found: dict[str, GateResult] = {}
    for name, told in patch.figures.get("gates", {}).items():
        compared = [PairedDifference(**one | {"answer": GateAnswer(one["answer"])}) for one in told["comparisons"]]
        found[name] = GateResult(told["adapter"], GateAnswer(told["answer"]), compared, told["rounds"])
    return found


def named(session: Session, digits: str) -> PromptPatch:
    """The patch whose id begins so; raises ``TracedError``."""
    found: Sequence[PromptPatch] = [one for one in list_patches(session) if one.id.startswith(digits.lower())]
    if not found:
        raise TracedError(f"no prompt patch has an id that begins with {digits!r}", hint="traced prompts")
    if len(found) > 1:
        short = ", ".join(one.id[:SHORT] for one in found[:3])
        raise TracedError(f"{len(found)} prompt patches have ids that begin with {digits!r}", hint=f"one of: {short}")
    return found[0]
