"""The command compose: compare the ways in which the adapters of the current cycle can answer together."""

from dataclasses import asdict
from typing import Any

from store.types import GateAnswer
from traced.cli.current_cycle import adapters, applicable, on_cycle
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings
from traced.cli.output import console, print_json
from traced.core.errors import CapabilityError, TracedError
from traced.evaluation.figures import percent
from traced.evaluation.report import composition_sentence
from traced.pipeline.compose import compose as compose_stage
from traced.pipeline.context import Context
from traced.pipeline.gate import stored_gate
from traced.pipeline.mixture import mixture
from traced.pipeline.preflight import check_cycle
from traced.pipeline.report import gather
from traced.pipeline.train import train
from traced.targets.conversation_target import conversation_target


def compose(
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ways in which the adapters that passed their gate can answer together, and store the best one."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)
    check_cycle(settings)
    merged, failed, composition = on_cycle(settings, _compose)
    if as_json:
        figures = asdict(composition) if composition else None
        print_json({"merged": merged, "failed": failed, "composition": figures})
        return
    for name, reason in failed.items():
        console.print(f"{name} failed: {reason}", highlight=False)
    if composition is None:
        is_recorded = conversation_target(settings).is_recorded
        reason = "recorded conversations cannot be played" if is_recorded else "composition.seeds is 0"
        console.print(f"Nothing was compared: {reason}, so a router decides.", highlight=False)
        return
    for candidate in composition.candidates:
        console.print(f"{candidate.name}: {percent(candidate.success)} of {candidate.tasks} tasks", highlight=False)
    console.print(composition_sentence(composition), highlight=False)
    console.print("Next: traced approve ADAPTER", highlight=False)


async def _compose(context: Context) -> tuple[str, dict[str, str], Any]:
    trained_adapters = [adapters(context, name)[-1] for name in applicable(context, "trained")]
    results = {name: stored_gate(context, name) for name in trained_adapters}
    passed = [name for name, result in results.items() if result is not None and result.answer is GateAnswer.PASS]
    if not passed:
        raise TracedError(f"cycle {context.cycle_id} has no adapter that passed its gate", hint="traced evaluate")
    joint_versions, failed = [], {}
    for training, environment in await mixture(context, passed):
        try:
            joint_versions.append(await train(context, training, environment))
        except CapabilityError as error:
            failed[training] = error.message
    merged_versions = await compose_stage(context, passed, joint_versions)
    return next(iter(merged_versions), ""), failed, gather(context).composition
