"""The checks that play: each takes the bench and answers (passed, evidence).

A check that meets a SandboxError lets it through; ``admit`` turns it into that check's failure. Evidence is plain JSON
and small: rates, the thresholds used and the first offender.
"""

import statistics
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox.admission.bench import Bench, Played, noting, play, play_panel, replay, together
from sandbox.admission.fingerprint import as_data, canonical, exact, shape
from sandbox.admission.policies import EXPLOITS, FLOOR, empty
from sandbox.client import SandboxSource
from sandbox.errors import EnvironmentFault, clipped
from sandbox.wire import OraclePlay

Verdict = tuple[bool, dict[str, Any]]
BaseRewards = Callable[[SandboxSource, list[int], int], Awaitable[list[list[float]]]]


async def runs(bench: Bench) -> Verdict:
    """Two seeds, one after the other, come through reset, step, score and oracle in both processes."""
    seeds = bench.panel(2)
    for source in (bench.source, bench.twin):
        for seed in seeds:
            await noting(seed, play(source, seed, empty, 2))
            await noting(seed, source.oracle(seed))
    return True, {"seeds": seeds}


async def determinism(bench: Bench) -> Verdict:
    """The same seed gives the same bytes: twice here, in a second process with another hash seed, and interleaved."""
    seeds = bench.panel(bench.thresholds.twin_seeds)
    first = await bench.oracle_plays(len(seeds))
    ways = {
        "again": await together(noting(seed, bench.source.oracle(seed)) for seed in seeds),
        "other process": await together(noting(seed, bench.twin.oracle(seed)) for seed in reversed(seeds)),
    }
    ways["other process"].reverse()
    for way, plays in ways.items():
        for seed, one, other in zip(seeds, first, plays, strict=True):
            difference = first_difference(canonical(as_data(one)), canonical(as_data(other)))
            if difference:
                return False, {"seed": seed, "where": way, "difference": difference}
    return await _interleaved(bench, seeds, first)


async def _interleaved(bench: Bench, seeds: list[int], plays: list[OraclePlay]) -> Verdict:
    """Stepping many episodes in turn must not let one see another's state."""
    scripts = [[turn.message for turn in one.turns] for one in plays]
    pairs = list(zip(seeds, scripts, strict=True))
    alone = [await noting(seed, replay(bench.source, seed, script)) for seed, script in pairs]
    mixed = await together(noting(seed, replay(bench.twin, seed, script)) for seed, script in pairs)
    for seed, one, other in zip(seeds, alone, mixed, strict=True):
        difference = first_difference(canonical(one.data), canonical(other.data))
        if difference:
            return False, {"seed": seed, "where": "interleaved with other episodes", "difference": difference}
    return True, {"seeds": len(seeds), "processes": 2, "interleaved": True}


def first_difference(one: str, other: str) -> str:
    """Empty when equal, else both texts around the first character that differs."""
    if one == other:
        return ""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - 40)
    return f"{one[begin : at + 40]!r} against {other[begin : at + 40]!r}"


async def oracle(bench: Bench) -> Verdict:
    """The oracle ends every probed seed with reward 1 and success."""
    plays = await bench.oracle_plays(bench.thresholds.seeds)
    seeds = bench.panel(len(plays))
    failed = [
        {"seed": seed, "reward": one.score.reward, "success": one.score.success, "done": one.done}
        for seed, one in zip(seeds, plays, strict=True)
        if one.score.reward < 1.0 or not one.score.success
    ]
    lengths = [len(one.turns) for one in plays]
    evidence = {"seeds": len(plays), "failed": len(failed), "mean_turns": round(statistics.fmean(lengths), 2)}
    return not failed, {**evidence, **({"first": failed[0]} if failed else {})}


async def diversity(bench: Bench) -> Verdict:
    """Different seeds differ, and in more than names, ids and numbers."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.diversity_seeds)
    shapes = Counter(shape(one) for one in plays)
    distinct = len({exact(one) for one in plays}) / len(plays)
    commonest = max(shapes.values()) / len(plays)
    evidence = {
        "seeds": len(plays),
        "distinct": round(distinct, 3),
        "distinct_required": limits.distinct,
        "shapes": len(shapes),
        "shape_fraction": round(len(shapes) / len(plays), 3),
        "shapes_required": limits.distinct_shapes,
        "commonest_shape": round(commonest, 3),
        "commonest_allowed": limits.commonest_shape,
    }
    passed = distinct >= limits.distinct and len(shapes) >= limits.distinct_shapes
    return passed and commonest <= limits.commonest_shape, evidence


def _rates(played: list[Played]) -> dict[str, float]:
    return {
        "reward": round(statistics.fmean(one.score.reward for one in played), 4),
        "success": round(statistics.fmean(one.score.success for one in played), 4),
    }


async def floor(bench: Bench) -> Verdict:
    """Policies that do not try stay at the floor."""
    limits = bench.thresholds
    rates = {name: _rates(await play_panel(bench, policy)) for name, policy in FLOOR.items()}
    allowed = {"reward": limits.floor_reward, "success": limits.floor_success}
    return _all_below(rates, allowed), {**rates, "allowed": allowed, "seeds": limits.seeds}


async def exploits(bench: Bench) -> Verdict:
    """Policies that want reward without work stay below the pass mark."""
    limits = bench.thresholds
    rates = {name: _rates(await play_panel(bench, policy)) for name, policy in EXPLOITS.items()}
    allowed = {"reward": limits.exploit_reward, "success": limits.exploit_success}
    return _all_below(rates, allowed), {**rates, "allowed": allowed, "seeds": limits.seeds}


def _all_below(rates: dict[str, dict[str, float]], allowed: dict[str, float]) -> bool:
    return all(rate[name] <= allowed[name] for rate in rates.values() for name in allowed)


async def leak(bench: Bench) -> Verdict:
    """The prompt does not hold the oracle's own words: a call's whole arguments, or its last message."""
    plays = await bench.oracle_plays(bench.thresholds.seeds)
    found = [(seed, text) for seed, one in zip(bench.panel(len(plays)), plays, strict=True) for text in leaks(one)[:1]]
    share = len(found) / len(plays)
    evidence: dict[str, Any] = {"share": round(share, 3), "allowed": bench.thresholds.leaking, "seeds": len(plays)}
    if found:
        evidence["first"] = {"seed": found[0][0], "text": clipped(found[0][1], 200)}
    return share <= bench.thresholds.leaking, evidence


def leaks(one: OraclePlay) -> list[str]:
    """The oracle's texts that stand word for word in the prompt; short ones and single values do not count."""
    prompt = "\n".join([one.task.system, *(str(message.get("content") or "") for message in one.task.messages)])
    texts: list[str] = []
    for turn in one.turns:
        texts += [call["function"]["arguments"] for call in turn.message.get("tool_calls") or []]
        texts.append(str(turn.message.get("content") or ""))
    return [text for text in texts if len(text) >= 12 and text in prompt]


async def effects(bench: Bench) -> Verdict:
    """No file, socket, process or thread was touched, and nothing printed, in all that was played so far."""
    records = [await source.effects() for source in (bench.source, bench.twin)]
    events = [str(event)[:200] for record in records for event in list(record.get("events") or [])[:20]]
    printed = sum(int(record.get("printed") or 0) for record in records)
    head = next((str(record["printed_head"])[:200] for record in records if record.get("printed_head")), "")
    evidence = {"events": events[:20], "printed_characters": printed, **({"printed": head} if head else {})}
    return not events and not printed, evidence


async def latency(bench: Bench) -> Verdict:
    """Reset and step are quick, as the worker measures them, one episode after the other along the oracle's way."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.twin_seeds)
    scripts = [[turn.message for turn in one.turns] for one in plays]
    replays = [
        await noting(seed, replay(bench.source, seed, script))
        for seed, script in zip(bench.panel(len(plays)), scripts, strict=True)
    ]
    reset = _p95([one.reset_seconds for one in replays])
    step = _p95([seconds for one in replays for seconds in one.step_seconds])
    evidence = {"reset_p95": reset, "reset_allowed": limits.reset_seconds, "step_p95": step}
    return reset <= limits.reset_seconds and step <= limits.step_seconds, {
        **evidence,
        "step_allowed": limits.step_seconds,
    }


def _p95(seconds: list[float]) -> float:
    ordered = sorted(seconds) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 6)


async def spread(bench: Bench, base_rewards: BaseRewards | None) -> Verdict:
    """The base model's rewards leave room to learn and differ within groups (TRACE, environment calibration).

    Without a base model nothing is asked, and the evidence says so (``left_out``).
    """
    if base_rewards is None:
        return True, {"left_out": "no base model was given"}
    limits = bench.thresholds
    seeds = bench.panel(limits.spread_groups)
    groups = await base_rewards(bench.source, seeds, limits.spread_rollouts)
    if len(groups) != len(seeds) or any(not group for group in groups):
        raise ValueError(f"base_rewards answered {len(groups)} groups for {len(seeds)} seeds, or an empty one")
    mean = statistics.fmean(reward for group in groups for reward in group)
    mixed = sum(len(set(group)) > 1 for group in groups) / len(groups)
    evidence = {
        "groups": len(groups),
        "rollouts": len(groups[0]),
        "mean": round(mean, 4),
        "mean_allowed": [limits.spread_low, limits.spread_high],
        "mixed": round(mixed, 4),
        "mixed_required": limits.spread_mixed,
    }
    return limits.spread_low <= mean <= limits.spread_high and mixed >= limits.spread_mixed, evidence


def fault_evidence(error: Exception) -> dict[str, Any]:
    """What a failed check says of the error that ended it."""
    notes = "; ".join(getattr(error, "__notes__", []))
    evidence = {"fault": type(error).__name__, "text": clipped(str(error), 1000), "at": notes}
    if isinstance(error, EnvironmentFault) and error.traceback:
        evidence["traceback"] = error.traceback
    return evidence
