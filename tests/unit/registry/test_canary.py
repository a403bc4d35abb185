"""Verdicts on a canary and the evidence behind them."""

import math

import pytest

from traced.config.cycle_sections import PromotionSection
from traced.registry.canary import Stratum, Verdict, evidence, judge

SETTINGS = PromotionSection(steps=[0.05, 0.25, 0.5], min_samples=20)


def stratum(share: float, challenger: tuple[int, int], control: tuple[int, int]) -> Stratum:
    """A stratum with evenly spread successes; an arm is (conversations, successes)."""

    def outcomes(n: int, successes: int) -> list[bool]:
        return [(number + 1) * successes // n > number * successes // n for number in range(n)]

    return Stratum(share, outcomes(*challenger), outcomes(*control))


@pytest.mark.parametrize(
    ("strata", "verdict", "share"),
    [
        ([stratum(0.05, (0, 0), (0, 0))], Verdict.WAIT, 0.0),
        ([stratum(0.05, (19, 19), (300, 200))], Verdict.WAIT, 0.0),
        ([stratum(0.05, (20, 14), (300, 200))], Verdict.STEP, 0.25),
        ([stratum(0.05, (20, 14), (300, 200)), stratum(0.25, (3, 3), (9, 6))], Verdict.WAIT, 0.0),
        ([stratum(0.05, (20, 14), (300, 200)), stratum(0.25, (20, 3), (60, 45))], Verdict.ROLL_BACK, 0.0),
        ([stratum(0.05, (10, 0), (200, 150))], Verdict.ROLL_BACK, 0.0),  # before the minimum of samples
        ([stratum(0.5, (40, 30), (40, 30))], Verdict.WAIT, 0.0),  # equal, but too few samples for a verdict
        ([stratum(0.5, (300, 210), (300, 210))], Verdict.FINISH, 0.0),
        ([stratum(0.05, (20, 14), (300, 200)), stratum(0.5, (300, 210), (300, 210))], Verdict.FINISH, 0.0),
        ([stratum(0.5, (60, 57), (60, 30))], Verdict.FINISH, 0.0),
        ([stratum(0.5, (1500, 900), (1500, 1050))], Verdict.ROLL_BACK, 0.0),
        ([stratum(0.5, (500, 500), (0, 0))], Verdict.WAIT, 0.0),  # no verdict without a control
    ],
)
def test_verdicts(strata: list[Stratum], verdict: Verdict, share: float) -> None:
    decision = judge(strata, SETTINGS)
    assert (decision.verdict, decision.share) == (verdict, share), decision.why


def test_the_evidence_is_what_decides() -> None:
    for challenger, harms, passes in (((10, 0), True, False), ((1500, 1050), False, True), ((5, 3), False, False)):
        control = (1500, 1050) if passes else (200, 150)
        figures = evidence([stratum(0.5, challenger, control)], SETTINGS)
        assert (figures.harm >= figures.enough, figures.fine >= figures.enough) == (harms, passes)
        assert figures.enough == pytest.approx(math.log(1 / SETTINGS.alpha))


def test_a_share_that_the_settings_no_longer_name_goes_on_to_the_next_larger() -> None:
    assert judge([stratum(0.1, (20, 14), (300, 200))], SETTINGS).share == 0.25
    assert judge([stratum(0.7, (20, 14), (300, 200))], SETTINGS).verdict is Verdict.WAIT


def test_why_names_the_figures() -> None:
    reason = judge([stratum(0.05, (10, 0), (200, 150))], SETTINGS).why
    assert reason.startswith("worse than its control: successes 0 of 10 with it, 150 of 200 without it, evidence ")


@pytest.mark.parametrize("steps", [[], [0.5, 0.25], [0.0, 0.5], [0.5, 1.0], [0.5, 0.5]])
def test_steps_rise_between_nothing_and_everything(steps: list[float]) -> None:
    with pytest.raises(ValueError, match="shares must be increasing"):
        PromotionSection(steps=steps)
