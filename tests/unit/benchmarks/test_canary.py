"""The benchmark of canaries computes what the product decides."""

import math

import numpy as np
import pytest

from benchmarks import canary
from benchmarks.canary import UNDECIDED, old_log_evidence, simulate
from traced.config.cycle_sections import PromotionSection
from traced.registry.canary import Stratum, Verdict, judge

SETTINGS = PromotionSection(min_samples=5, margin=0.4, steps=[0.25, 0.5])


@pytest.mark.parametrize(("rates", "ends"), [((0.8, 0.7), Verdict.FINISH), ((0.1, 0.8), Verdict.ROLL_BACK)])
def test_its_decisions_are_those_of_the_product(
    rates: tuple[float, float], ends: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same conversations, judged one after another."""
    conversations = []
    converse = canary.converse

    def recording_converse(*arguments: object) -> object:
        conversations.append(converse(*arguments))  # type: ignore[arg-type]
        return conversations[-1]

    monkeypatch.setattr(canary, "converse", recording_converse)
    decisions = simulate(np.random.default_rng(3), 4, 80, [rates], shares=SETTINGS.steps, settings=SETTINGS)
    verdicts = []
    for number in range(4):
        strata: list[Stratum] = []
        time, verdict = 0, Verdict.WAIT
        for share, (is_canary, success, _) in zip(SETTINGS.steps, conversations, strict=True):
            challenger, control = list[bool](), list[bool]()
            strata.append(Stratum(share, challenger, control))
            for by_canary, succeeded in zip(is_canary[number], success[number], strict=True):
                time += 1
                (challenger if by_canary else control).append(bool(succeeded))
                verdict = judge(strata, SETTINGS).verdict
                if verdict is not Verdict.WAIT:
                    break
            if verdict in (Verdict.FINISH, Verdict.ROLL_BACK):
                break
        verdicts.append(verdict)
        live, rolled_back = int(decisions.live[number]), int(decisions.rolled_back[number])
        if verdict is Verdict.FINISH:
            assert (live, live < rolled_back) == (time, True)
        elif verdict is Verdict.ROLL_BACK:
            assert (rolled_back, rolled_back <= live) == (time, True)
        else:
            assert (live, rolled_back) == (UNDECIDED, UNDECIDED)
    assert ends in verdicts


@pytest.mark.parametrize("control", [0.4, 0.6, 0.9])
def test_false_decisions_are_rare_however_often_it_is_looked_at(control: float) -> None:
    random, runs = np.random.default_rng(5), 400
    rates = {"live": (control - SETTINGS.margin, control), "rolled back": (control, control)}
    for name, truth in rates.items():
        decisions = simulate(random, runs, 600, [truth], settings=SETTINGS)
        wrong = decisions.live if name == "live" else decisions.rolled_back
        assert (wrong < UNDECIDED).mean() <= SETTINGS.alpha + 2 * math.sqrt(SETTINGS.alpha / runs)


def test_the_rule_of_before_is_the_mixture_over_the_likeliest_pair_of_the_null() -> None:
    def mixture(n: int, successes: int) -> float:
        return 1 / ((n + 1) * math.comb(n, successes))

    def likelihood(n: int, successes: int, rate: np.ndarray) -> np.ndarray:
        return rate**successes * (1 - rate) ** (n - successes)

    grid = np.linspace(0, 1, 1001)
    for better, worse in (((20, 15), (30, 20)), ((20, 5), (30, 28)), ((10, 10), (8, 0))):
        for margin in (0.0, 0.1):
            values = likelihood(*better, grid)[:, None] * likelihood(*worse, grid)[None, :]
            null = np.max(values[grid[:, None] <= grid[None, :] - margin + 1e-12])
            expected = math.log(mixture(*better) * mixture(*worse) / null)
            arms = [tuple(np.array([number]) for number in arm) for arm in (better, worse)]
            assert old_log_evidence(arms[0], arms[1], margin)[0] == pytest.approx(expected, abs=0.01)  # type: ignore[arg-type]
