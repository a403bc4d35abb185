"""Compare the log-probs of a batch's sampled tokens with what the trainer recomputes: which weights have sampled it?

Rollouts that are silently sampled from the base or from a stale adapter are the commonest fatal fault of this kind of
training; every other figure looks healthy. For each engine the sampled log-probs are compared with those of the adapter
that should have sampled, of the adapter before it, and of the base.

Test: with x the sampled log-prob of a token, a the adapter's and b an alternative's, the score is
sum(|x - a| - |x - b|) / sum(|a - b|), in [-1, 1]: 1 if the alternative explains every token. If the adapter has sampled
and the numerical noise x - a is symmetric, the summands have no positive mean and lie within +-|a - b|, so that
Hoeffding's inequality bounds the score's tail by exp(-score^2 n / 2) with n = sum(|a - b|)^2 / sum(|a - b|^2), the
effective number of tokens. An alternative is accepted only if it also leaves at most ``LEFT_OVER`` of the adapter's
distance; noise that all points to one side cannot reach that.

Independently of the alternatives, the drift must stay within a bound: the mean ratio p_trainer / p_engine, and the
tokens whose ratio is far from 1. Both are tests too: few tokens alone never exceed them.

The chance that a clean iteration is stopped is at most ``FALSE_STOPS``. Not covered: weights that differ from the
adapter by less than the numerical noise.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
FALSE_STOPS = 1e-3  # chance that a clean iteration is stopped
LEFT_OVER = 0.7  # of the adapter's distance to the sampled log-probs, at most, that a better explanation has
NOISE_CORRELATION_LENGTH = 4  # neighbouring tokens whose noise counts as one observation of the mean ratio
FAR_SHARE = 0.01  # of the tokens, at most, whose ratio is beyond the bound for the 99th percentile


# The alternatives to the adapter, by name, as a message calls them.
EXPLANATIONS = {"previous": "the adapter before the current one", "base": "the base model"}


class Source(IntEnum):
    """Which weights a batch was sampled from, as the metric ``drift_source`` has it; NaN if nothing was measured."""

    NOT_DISTINGUISHABLE = 0  # the alternatives differ too little from the adapter; its name and digest are confirmed
    ADAPTER = 1


@dataclass(frozen=True)
class DriftBound:
    """The drift that numerical noise may cause.

    Args:
        ratio: The distance of the mean ratio from 1.
        far: |log ratio| that all but 1 % of the tokens must stay below.
    """

    ratio: float
    far: float


# Published LoRA runs in bfloat16 have mean ratios of 0.9993 to 1.0004; two implementations of one model differ by some
# hundredths of a nat per token in bfloat16, and by 1e-5 in float32.
BOUNDS = {4: DriftBound(0.01, 0.05), 2: DriftBound(0.02, 0.5)}


def bound_for(bytes_per_weight: int) -> DriftBound:
    """Return the bound for a base whose weights have this size: 4 for float32, 2 for bfloat16."""
    return BOUNDS[4] if bytes_per_weight >= 4 else BOUNDS[2]


@dataclass(frozen=True)
class EngineTokens:
    """The tokens that an engine sampled, with their log-probs in nats, [n] each.

    Args:
        sampled: The engine's own.
        adapter: Those of the adapter that should have sampled.
        alternatives: Those of the other explanations, by name; an explanation that is not available is left out.
    """

    server: str
    sampled: Values
    adapter: Values
    alternatives: dict[str, Values]


@dataclass(frozen=True)
class Drift:
    """The figures of an iteration, over all measured tokens; NaN for what was not measured.

    Args:
        ratio: exp of the mean of log p_trainer - log p_engine.
        p99: The 99th percentile of |log p_trainer - log p_engine|.
        distances: The mean |log p - log p_engine| in nats of the adapter and of each alternative.
        kl_from_base: An estimate of KL(policy || base) in nats per token.
        reason: Why the training must stop; "" if it need not.
    """

    tokens: int
    ratio: float
    p99: float
    distances: dict[str, float]
    source: Source | None
    kl_from_base: float = math.nan
    reason: str = ""

    @classmethod
    def unmeasured(cls) -> "Drift":
        """Return what is known if no token was measured."""
        return cls(0, math.nan, math.nan, {}, None)

    def metrics(self) -> dict[str, float]:
        """Return the figures under the names of the metrics."""
        return {
            "kl_from_base": self.kl_from_base,
            "drift_tokens": self.tokens,
            "drift_ratio": self.ratio,
            "drift_p99": self.p99,
            "drift_source": math.nan if self.source is None else float(self.source),
            **{f"drift_{name}": self.distances.get(name, math.nan) for name in ("adapter", "previous", "base")},
        }


@dataclass(frozen=True)
class Score:
    """The comparison of an alternative with the adapter; arrays if the log-probs had leading dimensions.

    Args:
        value: In [-1, 1]; 1 if the alternative explains every token, -1 if the adapter does.
        tokens: The effective number of tokens.
        left_over: The alternative's distance divided by the adapter's.
    """

    value: Values
    tokens: Values
    left_over: Values

    def alternative_is_better(self, chance: float) -> NDArray[np.bool_]:
        """Return whether the alternative explains the tokens better, wrong with at most this probability."""
        return (self.value >= self._margin(chance)) & (self.left_over <= LEFT_OVER)

    def adapter_is_better(self, chance: float) -> NDArray[np.bool_]:
        """Return whether the adapter explains the tokens better, wrong with at most this probability."""
        with np.errstate(divide="ignore"):
            return (-self.value >= self._margin(chance)) & (1 / self.left_over <= LEFT_OVER)

    def _margin(self, chance: float) -> Values:
        with np.errstate(divide="ignore"):
            margin: Values = np.sqrt(2 * math.log(1 / chance) / self.tokens)
        return margin


def compare(sampled: Values, adapter: Values, alternative: Values) -> Score:
    """Compare two explanations of the sampled log-probs [..., n]."""
    of_adapter, of_alternative = np.abs(sampled - adapter), np.abs(sampled - alternative)
    gaps = np.abs(adapter - alternative)
    total = gaps.sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        # Equal explanations have the score 0 of 0 tokens.
        value = np.where(total > 0, (of_adapter - of_alternative).sum(-1) / total, 0.0)
        tokens = np.where(total > 0, total**2 / (gaps**2).sum(-1), 0.0)
        left_over = np.where(
            of_adapter.sum(-1) > 0,
            of_alternative.sum(-1) / of_adapter.sum(-1),
            np.where(of_alternative.sum(-1) > 0, np.inf, 1.0),
        )
    return Score(value, tokens, left_over)


def mean_is_off(log_ratios: Values, limit: float, chance: float) -> NDArray[np.bool_]:
    """Return whether the mean log ratio [..., n] is beyond log(1 + limit) by more than its statistical error."""
    count = log_ratios.shape[-1]
    if count < 2:
        return np.zeros(log_ratios.shape[:-1], dtype=bool)
    error = log_ratios.std(-1, ddof=1) * math.sqrt(NOISE_CORRELATION_LENGTH / count)
    z = NormalDist().inv_cdf(1 - chance / 2)
    is_off: NDArray[np.bool_] = np.abs(log_ratios.mean(-1)) - z * error > math.log1p(limit)
    return is_off


def too_many_far(log_ratios: Values, limit: float, chance: float) -> NDArray[np.bool_]:
    """Return whether more than 1 % of the tokens [..., n] are beyond ``limit``, by the binomial tail."""
    count = (np.abs(log_ratios) > limit).sum(-1)
    too_many: NDArray[np.bool_] = count >= _least_unlikely_count(log_ratios.shape[-1], chance)
    return too_many


def _least_unlikely_count(n: int, chance: float) -> int:
    """Return the smallest k for which n tokens have k or more far ones with a probability below ``chance``."""
    tail = 1.0
    for k in range(n + 1):
        if tail < chance:
            return k
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        tail -= math.exp(ways + k * math.log(FAR_SHARE) + (n - k) * math.log1p(-FAR_SHARE))
    return n + 1


def judge(engines: Sequence[EngineTokens], bound: DriftBound) -> Drift:
    """Return the figures over all engines, and the reason to stop if one of them has sampled from other weights."""
    engines = [engine for engine in engines if len(engine.sampled)]
    if not engines:
        return Drift.unmeasured()
    # A quarter of the chance for each of two alternatives and two bounds.
    chance = FALSE_STOPS / 4 / len(engines)
    reasons = [reason for engine in engines if (reason := _reason(engine, bound, chance))]
    is_certain = all(
        bool(compare(engine.sampled, engine.adapter, alternative).adapter_is_better(chance))
        for engine in engines
        for alternative in engine.alternatives.values()
    ) and all(engine.alternatives for engine in engines)
    log_ratios = np.concatenate([engine.adapter - engine.sampled for engine in engines])
    return Drift(
        tokens=len(log_ratios),
        ratio=math.exp(float(log_ratios.mean())),
        p99=float(np.quantile(np.abs(log_ratios), 0.99)),
        distances=_distances(engines),
        source=Source.ADAPTER if is_certain and not reasons else Source.NOT_DISTINGUISHABLE,
        kl_from_base=_kl_from_base(engines),
        reason="; ".join(reasons),
    )


def _reason(engine: EngineTokens, bound: DriftBound, chance: float) -> str:
    log_ratios = engine.adapter - engine.sampled
    place = engine.server or "the engine in this process"
    figures = f"{len(log_ratios)} tokens"
    for name, alternative in engine.alternatives.items():
        score = compare(engine.sampled, engine.adapter, alternative)
        if score.alternative_is_better(chance):
            of_adapter, of_alternative = np.abs(log_ratios).mean(), np.abs(alternative - engine.sampled).mean()
            return (
                f"{place} sampled from {EXPLANATIONS[name]}: its log-probs are {of_alternative:.2g} nats per token "
                f"away from those, and {of_adapter:.2g} from the current adapter's ({figures})"
            )
    ratio, p99 = math.exp(float(log_ratios.mean())), float(np.quantile(np.abs(log_ratios), 0.99))
    if mean_is_off(log_ratios, bound.ratio, chance):
        return (
            f"{place}: the mean ratio of trainer to engine is {ratio:.4f}, more than {bound.ratio:g} from 1 ({figures})"
        )
    if too_many_far(log_ratios, bound.far, chance):
        return f"{place}: the 99th percentile of |log ratio| is {p99:.2g}, more than {bound.far:g} ({figures})"
    return ""


def _distances(engines: Sequence[EngineTokens]) -> dict[str, float]:
    distances = {"adapter": _mean_distance([(engine.sampled, engine.adapter) for engine in engines])}
    for name in EXPLANATIONS:
        if all(name in engine.alternatives for engine in engines):
            distances[name] = _mean_distance([(engine.sampled, engine.alternatives[name]) for engine in engines])
    return distances


def _kl_from_base(engines: Sequence[EngineTokens]) -> float:
    """Return the mean of r - 1 - log r with r = p_base / p_engine; NaN without the base's log-probs.

    The estimator is the unbiased, non-negative "k3" of J. Schulman, "Approximating KL divergence" (2020).
    """
    if any("base" not in engine.alternatives for engine in engines):
        return math.nan
    log_ratios = np.concatenate([engine.alternatives["base"] - engine.sampled for engine in engines])
    return float((np.exp(log_ratios) - 1 - log_ratios).mean())


def _mean_distance(pairs: Sequence[tuple[Values, Values]]) -> float:
    return float(np.concatenate([np.abs(sampled - other) for sampled, other in pairs]).mean())


def choose_rows(servers: Sequence[Sequence[str]], lengths: Sequence[int], tokens: int, seed: int) -> list[int]:
    """Return the rows to measure, drawn by ``seed``: of each engine one, and more until it has ``tokens`` tokens.

    Args:
        servers: Per row the engines of its sampled tokens; empty for a row without any.
        lengths: Tokens of each row, prompt included; the first row of an engine may be longer than ``tokens``.
    """
    order = random.Random(seed).sample(range(len(lengths)), len(lengths))
    rows: set[int] = set()
    for server in sorted({server for row in servers for server in row}):
        total = 0
        for row in order:
            if server in servers[row] and (not total or total + lengths[row] <= tokens):
                total += lengths[row]
                rows.add(row)
    return sorted(rows)
