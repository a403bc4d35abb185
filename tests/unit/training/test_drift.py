"""Which weights have sampled: every planted fault is recognised, and clean batches are not stopped."""

import math

import numpy as np
import pytest

from traced.training.drift import (
    BOUNDS,
    Drift,
    DriftBound,
    EngineTokens,
    Source,
    Values,
    bound_for,
    choose_rows,
    compare,
    judge,
    mean_is_off,
    too_many_far,
)

FLOAT32, BFLOAT16 = BOUNDS[4], BOUNDS[2]
N = 200
PARTS = {"http://a": slice(0, 1), "http://b": slice(1, 3)}


def explanations(seed: int, step: float = 0.1, n: int = N) -> tuple[Values, Values, Values, np.random.Generator]:
    """Log-probs of n tokens under base, previous adapter and adapter, each ``step`` nats away from the one before."""
    random = np.random.default_rng(seed)
    base = -random.exponential(1.0, n)
    previous = base + random.normal(0, step, n)
    return base, previous, previous + random.normal(0, step, n), random


def verdict(sampled: Values, base: Values, previous: Values, adapter: Values, bound: DriftBound = FLOAT32) -> Drift:
    return judge([EngineTokens("http://a", sampled, adapter, {"previous": previous, "base": base})], bound)


@pytest.mark.parametrize(("noise", "bound"), [(1e-5, FLOAT32), (0.02, BFLOAT16)])
def test_the_adapter_is_recognised(noise: float, bound: DriftBound) -> None:
    base, previous, adapter, random = explanations(1)
    drift = verdict(adapter + random.normal(0, noise, N), base, previous, adapter, bound)
    assert drift.reason == ""
    assert drift.source is Source.ADAPTER
    assert drift.ratio == pytest.approx(1.0, abs=0.01)
    assert drift.distances["adapter"] < drift.distances["previous"] < drift.distances["base"]


@pytest.mark.parametrize("noise", [1e-5, 0.02])
@pytest.mark.parametrize(("name", "words"), [("base", "the base model"), ("previous", "the adapter before")])
def test_another_source_is_named(name: str, words: str, noise: float) -> None:
    base, previous, adapter, random = explanations(2)
    truth = {"base": base, "previous": previous}[name]
    drift = verdict(truth + random.normal(0, noise, N), base, previous, adapter, BFLOAT16)
    assert words in drift.reason
    assert "http://a" in drift.reason
    assert drift.source is Source.NOT_DISTINGUISHABLE


def test_another_adapter_passes_the_bound() -> None:
    base, previous, adapter, random = explanations(3)
    drift = verdict(base + random.normal(0, 0.2, N), base, previous, adapter)
    assert "more than" in drift.reason


def test_one_stale_replica_of_two_is_enough() -> None:
    base, previous, adapter, random = explanations(4, n=2 * N)
    noise = random.normal(0, 1e-5, 2 * N)
    fresh, stale = slice(0, N), slice(N, None)
    engines = [
        EngineTokens(url, truth[at] + noise[at], adapter[at], {"previous": previous[at], "base": base[at]})
        for url, truth, at in (("http://a", adapter, fresh), ("http://b", previous, stale))
    ]
    drift = judge(engines, FLOAT32)
    assert "http://b sampled from the adapter before" in drift.reason
    assert "http://a" not in drift.reason


def test_equal_weights_cannot_be_told_apart() -> None:
    base, _, _, random = explanations(5)
    drift = verdict(base + random.normal(0, 1e-5, N), base, base, base)
    assert (drift.reason, drift.source) == ("", Source.NOT_DISTINGUISHABLE)


def test_a_difference_below_the_noise_cannot_be_told_apart() -> None:
    base, previous, adapter, random = explanations(6, step=1e-4)
    for truth in (base, previous, adapter):
        drift = verdict(truth + random.normal(0, 0.02, N), base, previous, adapter, BFLOAT16)
        assert (drift.reason, drift.source) == ("", Source.NOT_DISTINGUISHABLE)


def test_noise_to_one_side_does_not_accuse() -> None:
    """All noise and all differences point the same way, and the noise is the larger."""
    base, _, _, random = explanations(7)
    difference = np.abs(random.normal(0, 1e-3, N))
    drift = verdict(base - np.abs(random.normal(0, 0.02, N)), base - difference, base - difference, base, BFLOAT16)
    assert drift.reason == ""


def test_few_tokens_do_not_accuse() -> None:
    base, previous, adapter, _ = explanations(8, n=10)
    drift = verdict(previous, base, previous, adapter, DriftBound(10.0, 10.0))
    assert (drift.reason, drift.source) == ("", Source.NOT_DISTINGUISHABLE)
    base, previous, adapter, _ = explanations(8, n=60)
    assert "the adapter before" in verdict(previous, base, previous, adapter, DriftBound(10.0, 10.0)).reason


def test_nothing_measured_is_no_healthy_figure() -> None:
    for drift in (judge([], FLOAT32), judge([EngineTokens("", np.empty(0), np.empty(0), {})], FLOAT32)):
        metrics = drift.metrics()
        assert metrics.pop("drift_tokens") == 0
        assert all(math.isnan(value) for value in metrics.values())
    base, _, adapter, _ = explanations(9)
    without_previous = judge([EngineTokens("", adapter, adapter, {"base": base})], FLOAT32).metrics()
    assert math.isnan(without_previous["drift_previous"])
    assert without_previous["drift_base"] > 0


def test_the_distance_from_the_base_is_over_the_tokens_of_all_engines() -> None:
    sampled, base = np.log([0.5, 0.2, 0.1]), np.log([0.125, 0.4, 0.1])
    engines = [EngineTokens(url, sampled[part], sampled[part], {"base": base[part]}) for url, part in PARTS.items()]
    # r = 1/4, 2 and 1
    expected = ((0.25 - 1 + math.log(4)) + (2 - 1 - math.log(2)) + 0) / 3
    assert judge(engines, FLOAT32).kl_from_base == pytest.approx(expected)


def test_the_score_is_minus_one_for_the_adapter_and_one_for_the_alternative() -> None:
    base, _, adapter, _ = explanations(10)
    assert compare(adapter, adapter, base).value == pytest.approx(-1)
    assert compare(base, adapter, base).value == pytest.approx(1)
    one_token = np.array([-1.0, 0.0, 0.0]), np.array([-2.0, 0.0, 0.0])
    assert compare(one_token[0], *one_token).tokens == pytest.approx(1)  # the others cannot tell


def test_the_bounds_are_tests() -> None:
    two_tokens = np.full(2, 0.02)
    assert mean_is_off(two_tokens, 0.01, 1e-4)  # without any spread even two tokens are enough
    random = np.random.default_rng(0)
    noisy = random.normal(0.02, 0.5, 100)
    assert not mean_is_off(noisy, 0.01, 1e-4)
    far = np.zeros(20)
    far[:2] = 9.0
    assert not too_many_far(far, 0.5, 1e-3)
    far[:5] = 9.0
    assert too_many_far(far, 0.5, 1e-3)


def test_a_bound_belongs_to_a_precision() -> None:
    assert bound_for(4) is FLOAT32
    assert bound_for(2) is bound_for(1) is BFLOAT16


def test_every_engine_has_a_row_even_if_it_is_long() -> None:
    servers = [["a"], ["a"], [], ["b", "a"], ["a"]]
    lengths = [10, 10, 10, 5000, 10]
    selections = [choose_rows(servers, lengths, 25, seed) for seed in range(20)]
    assert all(3 in rows and 2 not in rows for rows in selections)
    assert len({tuple(rows) for rows in selections}) > 1  # other places in other iterations
    assert choose_rows(servers, lengths, 25, 1) == choose_rows(servers, lengths, 25, 1)
