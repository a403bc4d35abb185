"""Decide what happens to a canary: next traffic share, live, rolled back, or wait for more conversations.

A canary takes a growing share of its capability's conversations (``steps``); what answers the others is its control. At
every share but the last, ``min_samples`` judged conversations suffice for the next share, unless the canary does harm.
At the last share the canary goes live when there is evidence that its success rate is not lower than the control's by
``margin`` or more. Harm, at any share, is evidence that the control is better. Both tests use the level ``alpha`` and
``traced.evaluation.sequential``, which stays valid however often it is evaluated. The test for "live" assumes a loss of
a quarter of the margin, the test for harm losses of one to four margins. So every difference is decided in time:
losses above half the margin by rollback, losses below five eighths of it by going live.

Invariants: conversations without a judged outcome are not counted; no evidence is never a pass. Everything here is pure
arithmetic; ``traced.gateway.canaries`` counts the conversations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from traced.config.cycle_sections import PromotionSection
from traced.evaluation.sequential import blocks, log_evidence

# The name in the promotion log of what is decided here.
ACTOR = "traced canary"

# Weights of the assumed differences, by their distance from the null hypothesis in margins. For "live", the evidence on
# equal rates after 500 conversations per arm is likeliest to suffice at sqrt(2 log(1 / alpha) / information), which is
# 0.77 at alpha 0.05, margin 0.1 and a rate of 0.5, where conversations say least.
LIVE_WEIGHTS = {0.75: 1.0}
HARM_WEIGHTS = {1.0: 1 / 3, 2.0: 1 / 3, 4.0: 1 / 3}


class Verdict(StrEnum):
    """The next action for a canary."""

    WAIT = "wait"
    STEP = "step"
    FINISH = "finish"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class Stratum:
    """The judged conversations of the canary and of its control under one traffic share.

    ``challenger`` and ``control`` say of each conversation whether it succeeded, in the order of their first verdicts.
    """

    share: float
    challenger: Sequence[bool]
    control: Sequence[bool]


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
    pairs = [list(blocks(stratum.challenger, stratum.control, stratum.share)) for stratum in strata]
    control_first = [[(control, challenger) for challenger, control in stratum] for stratum in pairs]
    harm = log_evidence(control_first, 0.0, _scaled(HARM_WEIGHTS, settings.margin))
    fine = log_evidence(pairs, settings.margin, _scaled(LIVE_WEIGHTS, settings.margin))
    return Evidence(harm, fine, -math.log(settings.alpha))


def judge(strata: Sequence[Stratum], settings: PromotionSection) -> Judgement:
    """Decide about a canary; the last of ``strata`` is its current share."""
    e_values = evidence(strata, settings)
    if e_values.harm >= e_values.enough:
        return Judgement(
            Verdict.ROLL_BACK, f"worse than its control: {_success_counts(strata)}, evidence {_times(e_values.harm)}"
        )
    current = strata[-1]
    if len(current.challenger) < settings.min_samples:
        return Judgement(
            Verdict.WAIT, f"{len(current.challenger)} of {settings.min_samples} judged at {100 * current.share:g} %"
        )
    next_share = next((share for share in sorted(settings.steps) if share > current.share), None)
    if next_share is not None:
        return Judgement(Verdict.STEP, f"not worse than its control so far: {_success_counts(strata)}", next_share)
    reason = (
        f"{_success_counts(strata)}, evidence {_times(e_values.fine)} that its success rate is at most "
        f"{settings.margin:g} below that of the control"
    )
    return Judgement(Verdict.FINISH if e_values.fine >= e_values.enough else Verdict.WAIT, reason)


def _scaled(weights: Mapping[float, float], margin: float) -> dict[float, float]:
    return {margins * margin: weight for margins, weight in weights.items()}


def _success_counts(strata: Sequence[Stratum]) -> str:
    def of(arms: Sequence[Sequence[bool]]) -> str:
        return f"{sum(map(sum, arms))} of {sum(map(len, arms))}"

    challenger, control = [stratum.challenger for stratum in strata], [stratum.control for stratum in strata]
    return f"successes {of(challenger)} with it, {of(control)} without it"


def _times(log: float) -> str:
    """Format an e-value, given as its natural logarithm."""
    return f"{math.exp(min(log, 50.0)):.3g}"
