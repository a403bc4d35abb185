"""Which is enough, a prompt or an adapter: what the gates say together, with no statistics of its own.

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
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from store.types import GateAnswer, GateResult

if TYPE_CHECKING:
    from traced.gates.gate import GatePolicy  # it brings scipy, and the service tells of patches

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
