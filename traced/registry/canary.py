"""What becomes of a canary: on to the next share, live, rolled back, or more conversations first.

A canary takes a growing share of its capability's conversations (``steps``); what has the others is its control. At
every share but the last ``min_samples`` judged conversations are enough to go on, unless it does harm. From the last
one it goes live when the evidence says that it is not worse than the control by ``margin`` or more. Harm, at any time,
is evidence that the control is better. Both are decided at ``alpha`` by ``sequential``: looking often costs nothing.

Invariants: conversations without a judged outcome count nowhere; no evidence is never a pass. Pure arithmetic; counting
is ``traced.gateway.canaries``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from traced.config.cycle_sections import PromotionSection
from traced.evaluation.sequential import Arm, pooled


class Verdict(StrEnum):
    """What to do with a canary now."""

    WAIT = "wait"
    STEP = "step"
    FINISH = "finish"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class Stratum:
    """What was judged under one share."""

    share: float
    challenger: Arm
    control: Arm


@dataclass(frozen=True)
class Judgement:
    """The verdict with its reason in words; ``share`` is the next one of a STEP."""

    verdict: Verdict
    why: str
    share: float = 0.0


@dataclass(frozen=True)
class Evidence:
    """What is known of a canary by now, as natural logarithms of e-values; ``enough`` decides.

    ``harm`` is for its being worse than the control, ``fine`` for its not being worse by the margin or more.
    """

    harm: float
    fine: float
    enough: float


def evidence(strata: Sequence[Stratum], settings: PromotionSection) -> Evidence:
    """Over all shares so far."""
    harm = pooled((one.control, one.challenger) for one in strata)
    fine = pooled(((one.challenger, one.control) for one in strata), settings.margin)
    return Evidence(harm, fine, -math.log(settings.alpha))


def judge(strata: Sequence[Stratum], settings: PromotionSection) -> Judgement:
    """Decide about a canary; the last of ``strata`` is under way."""
    known = evidence(strata, settings)
    if known.harm >= known.enough:
        return Judgement(Verdict.ROLL_BACK, f"it is worse: {_told(strata)}, evidence {_times(known.harm)}")
    now = strata[-1]
    if now.challenger.n < settings.min_samples:
        return Judgement(Verdict.WAIT, f"{now.challenger.n} of {settings.min_samples} judged at {100 * now.share:g} %")
    further = next((share for share in sorted(settings.steps) if share > now.share), None)
    if further is not None:
        return Judgement(Verdict.STEP, f"no harm seen: {_told(strata)}", further)
    shown = f"{_told(strata)}, evidence {_times(known.fine)} that it is within {settings.margin:g} of the control"
    return Judgement(Verdict.FINISH if known.fine >= known.enough else Verdict.WAIT, shown)


def _told(strata: Sequence[Stratum]) -> str:
    def of(arms: Sequence[Arm]) -> str:
        return f"{sum(arm.successes for arm in arms)} of {sum(arm.n for arm in arms)}"

    challenger, control = [one.challenger for one in strata], [one.control for one in strata]
    return f"{of(challenger)} succeeded with it, {of(control)} without"


def _times(log: float) -> str:
    """An e-value for people."""
    return f"{math.exp(min(log, 50.0)):.3g}"
