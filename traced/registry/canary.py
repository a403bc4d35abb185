"""Decide what happens to a canary: next traffic share, live, rolled back, or wait for more conversations.

A canary takes a growing share of its capability's conversations (``steps``); what answers the others is its control. At
every share but the last, ``min_samples`` judged conversations suffice for the next share, unless the canary does harm.
At the last share the canary goes live when there is evidence that its success rate is not lower than the control's by
``margin`` or more. Harm, at any share, is evidence that the control is better. Both tests use the level ``alpha`` and
``traced.evaluation.sequential``, which stays valid however often it is evaluated.

Invariants: conversations without a judged outcome are not counted; no evidence is never a pass. Everything here is pure
arithmetic; ``traced.gateway.canaries`` counts the conversations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from traced.config.cycle_sections import PromotionSection
from traced.evaluation.sequential import Arm, pooled

# The name in the promotion log of what is decided here.
ACTOR = "traced canary"


class Verdict(StrEnum):
    """The next action for a canary."""

    WAIT = "wait"
    STEP = "step"
    FINISH = "finish"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class Stratum:
    """The judged conversations of the canary and of its control under one traffic share."""

    share: float
    challenger: Arm
    control: Arm


@dataclass(frozen=True)
class Judgement:
    """The verdict with its reason in words; ``share`` is the next share if the verdict is STEP."""

    verdict: Verdict
    why: str
    share: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """The evidence on a canary so far, as natural logarithms of e-values; ``enough`` is the threshold.

    ``harm`` is evidence that the canary is worse than the control, ``fine`` that it is not worse by the margin or more.
    """

    harm: float
    fine: float
    enough: float


def evidence(strata: Sequence[Stratum], settings: PromotionSection) -> Evidence:
    """Return the evidence pooled over all shares so far."""
    harm = pooled((stratum.control, stratum.challenger) for stratum in strata)
    fine = pooled(((stratum.challenger, stratum.control) for stratum in strata), settings.margin)
    return Evidence(harm, fine, -math.log(settings.alpha))


def judge(strata: Sequence[Stratum], settings: PromotionSection) -> Judgement:
    """Decide about a canary; the last of ``strata`` is its current share."""
    e_values = evidence(strata, settings)
    if e_values.harm >= e_values.enough:
        return Judgement(
            Verdict.ROLL_BACK, f"worse than its control: {_success_counts(strata)}, evidence {_times(e_values.harm)}"
        )
    current = strata[-1]
    if current.challenger.n < settings.min_samples:
        return Judgement(
            Verdict.WAIT, f"{current.challenger.n} of {settings.min_samples} judged at {100 * current.share:g} %"
        )
    next_share = next((share for share in sorted(settings.steps) if share > current.share), None)
    if next_share is not None:
        return Judgement(Verdict.STEP, f"not worse than its control so far: {_success_counts(strata)}", next_share)
    reason = (
        f"{_success_counts(strata)}, evidence {_times(e_values.fine)} that its success rate is at most "
        f"{settings.margin:g} below that of the control"
    )
    return Judgement(Verdict.FINISH if e_values.fine >= e_values.enough else Verdict.WAIT, reason)


def _success_counts(strata: Sequence[Stratum]) -> str:
    def of(arms: Sequence[Arm]) -> str:
        return f"{sum(arm.successes for arm in arms)} of {sum(arm.n for arm in arms)}"

    challenger, control = [stratum.challenger for stratum in strata], [stratum.control for stratum in strata]
    return f"successes {of(challenger)} with it, {of(control)} without it"


def _times(log: float) -> str:
    """Format an e-value, given as its natural logarithm."""
    return f"{math.exp(min(log, 50.0)):.3g}"
