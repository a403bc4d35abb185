"""What an episode costs in time (``latency``), and what the environment did besides computing (``effects``)."""

import math

from sandbox.admission.bench import Bench, noting, replay
from sandbox.admission.evidence import Verdict

PLAYED = 2  # times, at most


async def effects(bench: Bench) -> Verdict:
    """No file, socket, process or thread was touched, and nothing printed, in all that was played so far."""
    records = [await source.effects() for source in (bench.source, bench.twin)]
    events = [str(event)[:200] for record in records for event in list(record.get("events") or [])[:20]]
    printed = sum(int(record.get("printed") or 0) for record in records)
    head = next((str(record["printed_head"])[:200] for record in records if record.get("printed_head")), "")
    evidence = {"events": events[:20], "printed_characters": printed, **({"printed": head} if head else {})}
    return not events and not printed, evidence


async def latency(bench: Bench) -> Verdict:
    """Reset and step are quick, as the worker measures them, one episode after the other along the oracle's way.

    Where they are not, the same is played again and of each call the quickest counts: a busy machine is no flaw.
    """
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.seeds)
    scripts = [[turn.message for turn in one.turns] for one in plays]
    resets, steps = [math.inf] * len(plays), [math.inf] * sum(map(len, scripts))
    for played in range(1, PLAYED + 1):
        replays = [
            await noting(seed, replay(bench.source, seed, script))
            for seed, script in zip(bench.panel(len(plays)), scripts, strict=True)
        ]
        resets = quickest(resets, [one.reset_seconds for one in replays])
        steps = quickest(steps, [seconds for one in replays for seconds in one.step_seconds])
        evidence = {
            "reset_p95": p95(resets),
            "reset_allowed": limits.reset_seconds,
            "step_p95": p95(steps),
            "step_allowed": limits.step_seconds,
            "played": played,
        }
        passed = p95(resets) <= limits.reset_seconds and p95(steps) <= limits.step_seconds
        if passed:
            break
    return passed, evidence


def quickest(one: list[float], other: list[float]) -> list[float]:
    """Call by call; calls that only one of them has made are left out."""
    return [min(pair) for pair in zip(one, other, strict=False)]


def p95(seconds: list[float]) -> float:
    """The 95th percentile, to the microsecond; 0 for no calls."""
    ordered = sorted(seconds) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 6)
