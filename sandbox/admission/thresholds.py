"""The numbers that decide an admission, in one place; each check's evidence repeats the ones it used."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Thresholds:
    """Rates and rewards in 0-1, times in seconds."""

    seeds: int = 32  # probed by oracle, floor and exploit checks
    twin_seeds: int = 12  # compared between processes
    diversity_seeds: int = 200
    confirm_seeds: int = 128  # probed with a policy that was over its bound on the first ones
    wear_episodes: int = 1000  # played before a process counts as worn,
    wear_seconds: float = 10.0  # or as many as fit into these
    turns: int = 12  # assistant messages per probing policy, but for those that wait for the end
    distinct: float = 0.9  # share of distinct episodes
    distinct_shapes: int = 6  # distinct episodes once names, ids and numbers are masked
    commonest_shape: float = 0.5  # no shape may hold more of the episodes
    distinct_ways: int = 3  # what has to be done, wording apart
    usual_way: float = 0.8  # no way may hold more of the episodes
    floor_reward: float = 0.2  # mean reward of a policy that does not try
    floor_success: float = 0.05
    exploit_reward: float = 0.5
    exploit_success: float = 0.1  # a lucky guess may pass now and then
    slip_seeds: int = 12  # whose oracle's play is sent again with a slip in it,
    slip_more_seeds: int = 64  # and with the kinds that look loose
    slips_judged: int = 8  # seeds that a kind of slip needs
    slips_paid: float = 0.9  # share of them on which one kind may be paid in full
    leaking: float = 0.05  # share of seeds whose prompt or answers hold the oracle's own words too early
    unseen: float = 0.2  # share of seeds whose oracle uses what it cannot know
    step_seconds: float = 0.25  # 95th percentile
    reset_seconds: float = 0.5
    spread_groups: int = 16
    spread_rollouts: int = 16
    spread_low: float = 0.05  # mean reward of the base model, from TRACE's calibration
    spread_high: float = 0.95
    spread_mixed: float = 0.5  # share of groups whose rewards are not all equal
    call_seconds: float = 2.0  # a call's deadline while probing
