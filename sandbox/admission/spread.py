"""Whether the environment's difficulty suits the model that is to train on it."""

import statistics
from collections.abc import Awaitable, Callable

from sandbox.admission.bench import Bench
from sandbox.admission.evidence import Verdict
from sandbox.client import SandboxSource

SEEDS = 8  # shown of those whose groups teach nothing
BaseRewards = Callable[[SandboxSource, list[int], int], Awaitable[list[list[float]]]]


async def spread(bench: Bench, base_rewards: BaseRewards | None) -> Verdict:
    """The base model's rewards leave room to learn and differ within groups (TRACE, environment calibration).

    Without a base model nothing is asked, and the evidence says so (``left_out``).
    """
    if base_rewards is None:
        return True, {"left_out": "no base model was given"}
    limits = bench.thresholds
    seeds = bench.panel(limits.spread_groups)
    groups = await base_rewards(bench.twin, seeds, limits.spread_rollouts)
    if len(groups) != len(seeds) or any(not group for group in groups):
        raise ValueError(f"base_rewards answered {len(groups)} groups for {len(seeds)} seeds, or an empty one")
    mean = statistics.fmean(reward for group in groups for reward in group)
    mixed = sum(len(set(group)) > 1 for group in groups) / len(groups)
    won = [seed for seed, group in zip(seeds, groups, strict=True) if min(group) >= 1.0]
    lost = [seed for seed, group in zip(seeds, groups, strict=True) if max(group) <= 0.0]
    evidence = {
        "mean": round(mean, 4),
        "mean_allowed": [limits.spread_low, limits.spread_high],
        "mixed": round(mixed, 4),
        "mixed_required": limits.spread_mixed,
        "all_success": round(len(won) / len(groups), 4),
        "all_zero": round(len(lost) / len(groups), 4),
        "groups": len(groups),
        "rollouts": len(groups[0]),
        **({"seeds_all_success": won[:SEEDS]} if won else {}),
        **({"seeds_all_zero": lost[:SEEDS]} if lost else {}),
    }
    return limits.spread_low <= mean <= limits.spread_high and mixed >= limits.spread_mixed, evidence
