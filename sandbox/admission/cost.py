"""What an episode costs in time (``latency``), and what the environment did besides computing (``effects``)."""

from sandbox.admission.bench import Bench, noting, replay
from sandbox.admission.evidence import Verdict


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
