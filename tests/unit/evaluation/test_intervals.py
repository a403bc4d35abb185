import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multinomial, norm

from store.types import EndCause, Outcome, Trajectory
from traced.core.errors import GateError
from traced.evaluation.intervals import Pair, Share, compare, mean_share, pair, tango


def trajectory(task: str, outcome: Outcome, *, trial: int = 0, model: str = "base") -> Trajectory:
    return Trajectory(
        id=f"{model}/{task}/{trial}",
        source="desk",
        split="gate",
        task_id=task,
        trial=trial,
        model=model,
        temperature=0.0,
        messages=[],
        tools=[],
        turns=[],
        reward=float(outcome is Outcome.SUCCESS),
        outcome=outcome,
        end_cause=EndCause.DONE,
    )


def test_interval_agrees_with_the_published_example() -> None:
    # Airway reactivity (Bentur et al. 2009), table 1 1 / 7 12, in Fagerland et al. 2014: -0.517 to -0.026.
    low, high = tango(gains=1, losses=7, pairs=21)
    assert (round(low, 3), round(high, 3)) == (-0.517, -0.026)


def test_no_discordant_pair_still_has_width() -> None:
    z2 = norm.ppf(0.975) ** 2
    low, high = tango(0, 0, 50)
    assert high == pytest.approx(z2 / (50 + z2))
    assert low == pytest.approx(-high)


counts = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 80)).filter(lambda t: sum(t) > 0)


@given(counts, st.sampled_from([0.8, 0.95, 0.99]))
def test_interval_holds_the_estimate_and_mirrors(table: tuple[int, int, int], level: float) -> None:
    gains, losses, rest = table
    pairs = gains + losses + rest
    low, high = tango(gains, losses, pairs, level)
    assert -1 <= low <= (gains - losses) / pairs <= high <= 1
    mirrored = tango(losses, gains, pairs, level)
    assert mirrored == pytest.approx((-high, -low), abs=1e-6)


@given(counts)
def test_more_evidence_or_less_confidence_narrows(table: tuple[int, int, int]) -> None:
    gains, losses, rest = table
    pairs = gains + losses + rest
    low, high = tango(gains, losses, pairs)
    for narrower in (tango(gains * 4, losses * 4, pairs * 4), tango(gains, losses, pairs, 0.8)):
        assert narrower[1] - narrower[0] < high - low


@pytest.mark.parametrize(("gains", "losses", "pairs"), [(0.30, 0.05, 40), (0.10, 0.10, 40), (0.02, 0.02, 60)])
def test_exact_coverage_of_independent_pairs(gains: float, losses: float, pairs: int) -> None:
    probabilities = multinomial(pairs, [gains, losses, 1 - gains - losses])
    coverage = 0.0
    for g, k in itertools.product(range(pairs + 1), repeat=2):
        weight = probabilities.pmf([g, k, pairs - g - k]) if g + k <= pairs else 0.0
        if weight > 1e-6:
            low, high = tango(g, k, pairs)
            coverage += weight * (low <= gains - losses <= high)
    assert coverage > 0.93


def simulated(rng: np.random.Generator, tasks: int, trials: int, gain: float) -> list[Pair]:
    """Tasks differ in difficulty, so that trials of one task go together; ``gain`` is what the adapter adds."""
    difficulty = rng.beta(0.5, 0.5, tasks) * (1 - gain)
    base = rng.random((tasks, trials)) < difficulty[:, None]
    adapter = rng.random((tasks, trials)) < difficulty[:, None] + gain
    return [Pair(str(t), k, bool(base[t, k]), bool(adapter[t, k])) for t in range(tasks) for k in range(trials)]


def same_every_trial(rng: np.random.Generator, tasks: int, trials: int, gain: float) -> list[Pair]:
    """Greedy decoding: all trials of a task agree, so only the tasks are evidence."""
    return [replace(p, trial=k) for p in simulated(rng, tasks, 1, gain) for k in range(trials)]


@pytest.mark.parametrize("model", [simulated, same_every_trial])
@pytest.mark.parametrize("gain", [0.0, 0.2])
def test_coverage_with_several_trials_of_each_task(model, gain: float) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(7)
    runs = 600
    hits = 0
    for _ in range(runs):
        interval = compare(model(rng, 40, 4, gain))
        hits += interval.low <= gain <= interval.high
    assert hits / runs > 0.93


def test_repeating_identical_trials_adds_no_evidence() -> None:
    single = simulated(np.random.default_rng(1), 60, 1, 0.1)
    repeated = [replace(p, trial=k) for p in single for k in range(5)]
    assert compare(repeated).design_effect == pytest.approx(5.0, rel=0.05)
    single_interval, five = compare(single), compare(repeated)
    assert (five.low, five.high) == pytest.approx((single_interval.low, single_interval.high), abs=1e-9)
    assert (single_interval.tasks, single_interval.pairs, five.tasks, five.pairs) == (60, 60, 60, 300)


def test_a_mean_share_takes_a_task_as_one_cluster() -> None:
    assert mean_share([]) == Share(0, 0.0, 0.0, 1.0)
    independent = mean_share([(str(n), float(n % 4 > 0)) for n in range(40)])
    clustered = mean_share([(str(n // 10), float(n >= 10)) for n in range(40)])
    assert (independent.count, independent.share, clustered.share) == (40, 0.75, 0.75)
    assert clustered.high - clustered.low > 1.5 * (independent.high - independent.low)
    assert mean_share([("a", 0.5), ("b", 1.0)]).share == 0.75


def test_no_pairs_is_no_knowledge() -> None:
    assert (compare([]).low, compare([]).high) == (-1.0, 1.0)


def test_pairs_match_by_task_and_trial_and_infrastructure_drops_the_pair() -> None:
    base = [trajectory(str(i), Outcome.FAILURE) for i in range(20)]
    adapter = [trajectory(str(i), Outcome.SUCCESS, model="a@v1") for i in reversed(range(20))]
    adapter[3] = replace(adapter[3], outcome=Outcome.INFRASTRUCTURE)
    pairs = pair(base, adapter)
    assert len(pairs) == 19
    assert all(p.adapter and not p.base for p in pairs)
    assert adapter[3].task_id not in {p.task_id for p in pairs}


def test_unpaired_repeated_and_broken_evidence_is_refused() -> None:
    base = [trajectory(str(i), Outcome.SUCCESS) for i in range(10)]
    with pytest.raises(GateError, match="task 9 trial 0 has an episode of only one"):
        pair(base, base[:9])
    with pytest.raises(GateError, match="task 3 trial 0 appears twice"):
        pair([*base, base[3]], base)
    lost_episodes = [replace(t, outcome=Outcome.INFRASTRUCTURE) for t in base[:2]] + base[2:]
    with pytest.raises(GateError, match="2 of 10 pairs ended in an infrastructure failure"):
        pair(base, lost_episodes)


@pytest.mark.parametrize("level", [0.95, 0.999999, 1 - 1e-14])
@pytest.mark.parametrize(("gains", "losses", "ties"), [(5, 2, 30), (1, 0, 1), (0, 0, 2), (2, 0, 0), (0, 2, 0)])
def test_an_early_look_of_many_has_an_interval_too(level: float, gains: int, losses: int, ties: int) -> None:
    """Its critical value may be larger than any value of the statistic, or infinite."""
    changes = [1] * gains + [-1] * losses + [0] * ties
    interval = compare([Pair(str(task), 0, change < 0, change > 0) for task, change in enumerate(changes)], level)
    assert -1 <= interval.low <= interval.difference <= interval.high <= 1
