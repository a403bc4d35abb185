"""What each measure of the training is worth: the published adapters' success in their environment and on the target.

    python -m benchmarks.training_quality [--seeds 5] [--first-seed 0] [--variants fresh,open,...] [--into DIR]
                                          [--capabilities NAME,...] [--set KEY=VALUE] [--json]

For each seed one cycle on the desk is brought to admitted environments. Each variant then trains one adapter per
capability there, with the settings of a cycle and its own changes (``VARIANTS``), all with validation. Two policies of
each training play greedily, the last one and the best one by validation: 200 seeds of the environment, and the last
200 of the target's train split. The test split is not used. Everything is kept in DIR, and a run that was stopped goes
on. Variants named ``after-fast`` begin with the best policy of ``fast``, which is trained before them if need be.
``DIR/seed-N.json`` has the settings and the figures of a seed; variants that are in it are not trained again, so
these files alone continue an ablation on another machine. With other settings (``--set``) DIR is refused.

``DIR`` does not know which capabilities a variant was trained for: give each choice of them a DIR of its own.

For each variant, for all capabilities and for each: success of both policies in the environment and on the target, mean
and range over the trainings; the mean validation success by iteration; the mean share of mixed groups; iterations
without a gradient while episodes failed; how many trainings ended with three of them. A training that found nothing to
learn from counts among these, with the base as both of its policies.

Aims: the best policy is not below the last one in its environment, in the mean of each variant, and no training of the
variants in ``WITH_GRADIENT`` ends without a gradient. Exit code 1 when one is missed. Hours on two cores.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from store.repositories.capabilities import get_capability
from store.repositories.cycles import list_cycles
from store.repositories.environments import get_environment
from traced.cli.current_cycle import admitted_environments
from traced.cli.options import parse_pair
from traced.config.settings import Settings, load_settings
from traced.core.files import publish_file
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.evaluation.intervals import rate
from traced.pipeline.analyze import stored_findings
from traced.pipeline.context import Context, open_context
from traced.pipeline.episodes import BASE, episodes, model_policy, seed_jobs, split_jobs
from traced.pipeline.gate_episodes import GATE_SEEDS
from traced.pipeline.train import job_in, store_variables
from traced.training.device import ON_CPU
from traced.training.errors import NothingToLearn
from traced.training.metrics import Metrics, read_metrics
from traced.training.process import train
from traced.training.trainer import newest_checkpoint

VALIDATE_EVERY = 5
# The trainings of all variants begin without any measure, whatever the defaults of the settings are.
NO_MEASURE = {
    "open_share": 0.0,
    "recoveries": 0,
    "kl": 0.0,
    "entropy_bonus": 0.0,
    "hint_share": 0.0,
    "temperature": 1.0,
}
FAST = 1e-2
COLLAPSED = "fast"  # the variant with whose best policies those named ``after-fast`` begin
AFTER_COLLAPSE = {"lr": FAST, "iterations": 10}
SLOW_WARM = {"lr": FAST / 2, "temperature": 1.2}  # what ``training.recoveries`` changes
VARIANTS: dict[str, dict[str, Any]] = {
    "fresh": {},
    "open": {"open_share": 0.5},
    "recover": {"recoveries": 2, "recovery_temperature": 1.2},
    "kl": {"kl": 0.01},
    "entropy": {"entropy_bonus": 0.01},
    "hints": {"hint_share": 0.25},
    "slow": {"lr": 1e-3},
    "warm": {"temperature": 1.2},
    "open-recover": {"open_share": 0.5, "recoveries": 2, "recovery_temperature": 1.2},
    "open-warm": {"open_share": 0.5, "recoveries": 2, "recovery_temperature": 1.2, "temperature": 1.2},
    "open-slow": {"open_share": 0.5, "recoveries": 2, "recovery_temperature": 1.2, "lr": 1e-3},
    # At five times the default rate trainings collapse.
    "fast": {"lr": FAST, "iterations": 30},
    "fast-recover": {"lr": FAST, "recoveries": 2, "recovery_temperature": 1.2},
    # What each answer to a collapse is worth: these begin where a recovery does, with the best policy of ``fast``.
    "after-fast": AFTER_COLLAPSE,
    "after-fast-slow": AFTER_COLLAPSE | {"lr": FAST / 2},
    "after-fast-warm": AFTER_COLLAPSE | {"temperature": 1.2},
    "after-fast-slow-warm": AFTER_COLLAPSE | SLOW_WARM,
    "after-fast-slow-warm-kl": AFTER_COLLAPSE | SLOW_WARM | {"kl": 0.01},
    "after-fast-slow-warm-entropy": AFTER_COLLAPSE | SLOW_WARM | {"entropy_bonus": 0.01},
    "after-fast-slow-warm-hints": AFTER_COLLAPSE | SLOW_WARM | {"hint_share": 0.25},
}
WITH_GRADIENT = ("recover", "open-recover", "open-warm", "open-slow")  # variants that answer a loss of the gradient
PLACES = ("last_environment", "best_environment", "last_target", "best_target")
EPISODES = 200
LAST = 3  # iterations without a gradient
STAGES = ("collect", "analyze", "synthesize", "admit")


def main() -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_quality", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS), help="variants, separated by commas")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting of the cycles")
    parser.add_argument("--into", type=Path, help="folder of the runs (default: a new temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.add_argument("--capabilities", default="", help="train for these alone, separated by commas")
    options = parser.parse_args()
    capabilities = options.capabilities.split(",") if options.capabilities else []
    variants = options.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"unknown variants {', '.join(sorted(unknown))}; known: {', '.join(VARIANTS)}")
    folder = options.into or Path(tempfile.mkdtemp(prefix="traced-training-"))
    rows = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        record = folder / f"seed-{seed}.json"
        seed_rows = recorded_rows(record, options.settings)
        if missing := [name for name in variants if name not in {row["variant"] for row in seed_rows}]:
            settings = prepare(seed, folder / f"seed-{seed}", options.settings)
            # One variant after the other, so that a stopped run leaves whole ones.
            for variant in missing:
                new_rows = [{"seed": seed, **row} for row in asyncio.run(train_all(settings, variant, capabilities))]
                seed_rows += new_rows
                document = {"settings": sorted(options.settings), "rows": seed_rows}
                publish_file(record, json.dumps(document, indent=1) + "\n")
                if not options.json:
                    for row in new_rows:
                        print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
        rows += [row for row in seed_rows if row["variant"] in variants]
    figures = summary(rows, variants)
    print(json.dumps(figures) if options.json else json.dumps(figures["variants"], indent=1))
    return 0 if figures["meets"] else 1


def continues_collapsed(variant: str) -> bool:
    """Return whether a variant begins with a policy of the variant ``COLLAPSED``."""
    return variant.startswith("after-fast")


def recorded_rows(record: Path, pairs: Sequence[str]) -> list[dict[str, Any]]:
    """Return the figures on record; ends the program if they are those of other settings."""
    if not record.exists():
        return []
    document = json.loads(record.read_text())
    if document["settings"] != sorted(pairs):
        raise SystemExit(
            f"{record} has the figures of the settings {document['settings']}, and these are {sorted(pairs)}; "
            "use another --into, or the same --set"
        )
    return list(document["rows"])


def prepare(seed: int, data_dir: Path, pairs: Sequence[str]) -> Settings:
    """Bring the cycle of a seed to admitted environments and return its settings; stages that are done are quick."""
    options = ["--data-dir", str(data_dir), "--set", f"seed={seed}"]
    for pair in pairs:
        options += ["--set", pair]
    for stage in STAGES:
        command = [sys.executable, "-m", "traced", stage, *options]
        result = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # A capability without an environment, or whose environment is refused, ends alone, with exit code 1.
        if result.returncode not in ((0, 1) if stage in ("synthesize", "admit") else (0,)):
            raise SystemExit(f"seed {seed}: {' '.join(command)}\n{result.stderr}")
    return load_settings(data_dir, {"seed": seed, **dict(parse_pair(pair) for pair in pairs)})


async def train_all(settings: Settings, variant: str, capabilities: Sequence[str]) -> list[dict[str, Any]]:
    """Train and play a variant in the admitted environments of the only cycle: of these capabilities, or all."""
    progress = Progress(Console(file=StringIO()))
    with Meter() as meter:
        async with open_context(settings, "", progress, meter) as unbound:
            with unbound.read_session() as session:
                cycle = list_cycles(session)[0]
            context = replace(unbound, cycle_id=cycle.id)
            return [
                await train_variant(context, capability, environment, variant)
                for capability, environment in with_environments(context)
                if not capabilities or capability in capabilities
            ]


def with_environments(context: Context) -> list[tuple[str, str]]:
    """Return capability and environment of the cycle's admitted environments."""
    names = [finding.capability for finding in stored_findings(context) if finding.retained]
    return [(name, hashes[-1]) for name in names if (hashes := admitted_environments(context, name))]


async def train_variant(context: Context, capability: str, environment: str, variant: str) -> dict[str, Any]:
    """Train a variant in an environment, play with its adapter, and return its figures; they are kept on disk."""
    folder = context.data_dir / "variants"
    out = folder / variant / capability
    result_file = out / "figures.json"
    if result_file.exists():
        figures = json.loads(result_file.read_text())
        return figures | ending(read_metrics(out / "metrics.jsonl"), failure=figures.get("failure", ""))
    job = job_in(context, f"{context.cycle_id}/{capability}/{variant}", capability, environment, ON_CPU)
    job = replace(job, out_dir=str(out), threads=context.settings.threads)
    with context.read_session() as session:
        description = get_capability(session, context.cycle_id, capability).description
    changes = NO_MEASURE | VARIANTS[variant]
    has_hints = any(changes.get(key) for key in ("hint_share", "recovery_hint_share"))
    job = replace(job, validate_every=VALIDATE_EVERY, hint=description if has_hints else "", **changes)
    if continues_collapsed(variant):
        start = folder / COLLAPSED / capability / "adapter"
        if not start.exists():
            await train_variant(context, capability, environment, COLLAPSED)
        job = replace(job, start=str(start))
    policy: int | None = 0
    try:
        result = await train(job, lambda _: None, store_variables(context))
    except NothingToLearn as error:
        iterations, failure = len(read_metrics(job.metrics)), str(error)
        best = last = await success(context, BASE, None, environment)
    else:
        iterations, policy, failure = result.iterations, result.policy, ""
        best = last = await success(context, f"{variant}-{capability}", job.adapter, environment)
        if policy != iterations and (checkpoint := newest_checkpoint(out / "checkpoints")):
            last = await success(context, f"{variant}-{capability}-last", checkpoint, environment)
    figures = {
        "variant": variant,
        "capability": capability,
        "iterations": iterations,
        "policy": policy,
        "failure": failure,
        **{f"best_{place}": value for place, value in best.items()},
        **{f"last_{place}": value for place, value in last.items()},
        **ending(read_metrics(job.metrics), failure=failure),
    }
    result_file.write_text(json.dumps(figures) + "\n")
    return figures


async def success(context: Context, name: str, adapter: Path | None, environment: str) -> dict[str, float]:
    """Return the greedy success of an adapter's folder, or of the base, in its environment and on the target."""
    if adapter is not None:
        await context.serve(name, adapter)
    with context.read_session() as session:
        source_code = get_environment(session, environment).source_code
    temperature = context.settings.engine.temperature
    policy = await model_policy(context, name, temperature)
    train_split = context.target.splits["train"]
    target_jobs = split_jobs(context.target, "train", train_split[-EPISODES:])
    async with context.environment_source(source_code) as source:
        jobs = seed_jobs(range(GATE_SEEDS, GATE_SEEDS + EPISODES))
        inside = await episodes(context, source, jobs, policy, model=name, temperature=temperature, tokens=False)
    async with context.target_source() as source:
        outside = await episodes(
            context, source, target_jobs, policy, model=name, temperature=temperature, tokens=False
        )
    return {"environment": rate(name, inside).rate, "target": rate(name, outside).rate}


def ending(rows: Sequence[Metrics], *, failure: str = "") -> dict[str, Any]:
    """Return the figures of a training's iterations, its end, and its validation by iteration.

    Args:
        failure: Why the training found nothing to learn from; "" if it did.
    """
    last = rows[-LAST:]
    has_none = len(last) == LAST and all(row["trajectories_kept"] == 0 for row in last)
    curve = {int(row["validation_policy"]): row["validation_success"] for row in rows if "validation_policy" in row}
    return {
        "no_gradient": bool(failure) or (has_none and any(row["success"] < 1 for row in last)),
        "iterations_without_gradient": sum(row["trajectories_kept"] == 0 and row["success"] < 1 for row in rows),
        "mixed_groups": statistics.mean(row["mixed_groups"] for row in rows) if rows else 0.0,
        "curve": curve,
    }


def summary(rows: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> dict[str, Any]:
    """Return the figures by variant, and whether the aims are met."""
    by_variant: dict[str, Any] = {}
    for variant in variants:
        variant_rows = [row for row in rows if row["variant"] == variant]
        capabilities = sorted({row["capability"] for row in variant_rows})
        by_variant[variant] = figures_of(variant_rows) | {
            "capabilities": {
                name: figures_of([row for row in variant_rows if row["capability"] == name]) for name in capabilities
            }
        }
    aims = {"best_not_below_last": 0.0, "no_gradient": 0}
    means = [{key: figures[key].get("mean", 0.0) for key in PLACES} for figures in by_variant.values()]
    meets = bool(rows)
    meets = meets and all(row["best_environment"] >= row["last_environment"] for row in means)
    meets = meets and all(by_variant[name]["no_gradient"] == 0 for name in WITH_GRADIENT if name in by_variant)
    return {"rows": list(rows), "variants": by_variant, "aims": aims, "meets": meets}


def figures_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of some trainings together."""
    curves: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        for policy, value in row["curve"].items():
            curves[int(policy)].append(value)
    return {
        "trainings": len(rows),
        **{key: spread([row[key] for row in rows]) for key in (*PLACES, "mixed_groups")},
        "iterations_without_gradient": sum(row["iterations_without_gradient"] for row in rows),
        "no_gradient": sum(row["no_gradient"] for row in rows),
        "validation": {policy: statistics.mean(values) for policy, values in sorted(curves.items())},
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and range of some rates."""
    return {"mean": statistics.mean(values), "range": [min(values), max(values)]} if values else {}


if __name__ == "__main__":
    sys.exit(main())
