"""Commands that run one stage on the current cycle: collect, synthesize, optimize-prompt, train, evaluate.

The current cycle is the newest one of the same target, model, seed and settings. ``traced demo`` works on the same
cycle, so each continues the work of the other. The command admit, which also checks files, is in
``traced.cli.admission``; ``admit_capabilities`` checks the capabilities of the cycle for it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from store.records import PromptPatch, StageState
from traced.cli.current_cycle import (
    adapters,
    admitted_environments,
    applicable,
    environments,
    is_analyzed,
    next_attempt,
    on_cycle,
    refused_environments,
    to_judge,
    written_by,
)
from traced.cli.evidence import patch_as_json, patch_lines
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings, repeated
from traced.cli.output import console, print_json
from traced.cli.refusals import remedy
from traced.config.settings import Settings
from traced.core.errors import CapabilityError, TracedError
from traced.evaluation.intervals import rate
from traced.pipeline.admit import admit as admit_stage
from traced.pipeline.admit import stored_report
from traced.pipeline.collect import collect as collect_stage
from traced.pipeline.context import Context
from traced.pipeline.evaluate import evaluate_base
from traced.pipeline.gate import figures_of, gate
from traced.pipeline.incumbent import incumbent_of
from traced.pipeline.optimize_prompt import optimize_prompt as optimize_prompt_stage
from traced.pipeline.preflight import check_cycle
from traced.pipeline.synthesize import synthesize as synthesize_stage
from traced.pipeline.train import train as train_stage
from traced.targets.conversation_target import conversation_target
from traced.targets.registry import check_playable, target

Capabilities = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CAPABILITY]...",
        help="Capabilities of the current cycle (default: all that are ready for this stage).",
        show_default=False,
    ),
]


class Synthesizer(StrEnum):
    """A synthesizer of environments."""

    BUILTIN = "builtin"
    LLM = "llm"


def collect(
    *,
    episodes: Annotated[
        int | None, typer.Option("--episodes", help="Number of episodes to record.", show_default=False)
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Record episodes of the live system on the target's train split.

    For a target of recorded conversations: select those that have an outcome for a new analysis.
    """
    settings = read_settings(
        data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads, collect__episodes=episodes
    )

    async def work(context: Context) -> dict[str, Any]:
        return {"cycle": context.cycle_id, "success": rate(incumbent_of(context).model, await collect_stage(context))}

    is_recorded = conversation_target(settings).is_recorded
    result = on_cycle(settings, work, create=True, is_over=is_analyzed if is_recorded else None)
    if as_json:
        print_json(result)
        return
    success, noun = result["success"], "conversations" if is_recorded else "episodes"
    command = repeated("traced analyze", data_dir, overrides, model=model, seed=seed, collect__episodes=episodes)
    console.print(
        f"{success.episodes} {noun} of cycle {result['cycle']}: {100 * success.rate:.1f} % succeeded "
        f"[{100 * success.low:.1f}, {100 * success.high:.1f}], {success.infrastructure} lost to infrastructure. "
        f"Next: {command}",
        highlight=False,
    )


def synthesize(
    capabilities: Capabilities = None,
    *,
    synthesizer: Annotated[
        Synthesizer | None,
        typer.Option(
            "--synthesizer",
            help="Author: builtin (templates) or llm (language model); overrides the cycle's settings.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Write an environment for each retained capability; one that fails the static checks is rewritten at once.

    After `traced admit` has refused an environment, it says what helps: with llm, this command writes a repair.
    """
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed)

    async def work(context: Context, capability: str) -> dict[str, Any]:
        context = written_by(context, synthesizer.value if synthesizer else None)
        environment = await synthesize_stage(context, capability, next_attempt(context, capability))
        while refused_environments(context, environment):  # refused by the static checks, which need no container
            environment = await synthesize_stage(context, capability, next_attempt(context, capability))
        return {"capability": capability, "environment": environment, "summary": f"env:{environment[:12]}"}

    _on_capabilities(
        settings, Step("environments", "retained", work, "traced admit", "synthesize"), capabilities, as_json
    )


def admit_capabilities(settings: Settings, capabilities: Sequence[str], as_json: bool) -> None:
    """Check the environments of the named capabilities of the current cycle, by default of all, and exit."""

    async def work(context: Context, capability: str) -> dict[str, Any]:
        environment = to_judge(context, capability)
        name = f"env:{environment.hash[:12]}"
        if not await admit_stage(context, capability, environment.hash):
            report = stored_report(context, environment.hash)
            checks = [check for check in report.checks if not check.passed] if report else []
            reason = f"traced show environment {name} shows the reasons"
            hint = f"{reason}; {remedy(context, capability, environment.synthesizer, checks)}"
            raise CapabilityError(f"{name} is refused by {', '.join(check.name for check in checks)}", hint=hint)
        return {"capability": capability, "environment": environment.hash, "summary": f"{name} is admitted"}

    _on_capabilities(settings, Step("admitted", "written", work, "traced train", "admit"), capabilities, as_json)


def optimize_prompt(
    capability: Annotated[str, typer.Argument(help="Capability of the current cycle with an admitted environment.")],
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Optimize a prompt for a capability and compare it with the adapter. A stopped run is resumed."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)

    async def work(context: Context) -> PromptPatch:
        return await optimize_prompt_stage(context, capability, _newest_admitted(context, capability))

    patch = on_cycle(settings, work)
    if as_json:
        print_json(patch_as_json(patch))
        return
    for text in patch_lines(patch):
        console.print(text, highlight=False, markup=False)


def train(
    capabilities: Capabilities = None,
    *,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Train an adapter in each admitted environment; a stopped run resumes from its last checkpoint."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)

    check_cycle(settings)

    async def work(context: Context, capability: str) -> dict[str, Any]:
        adapter = await train_stage(context, capability, admitted_environments(context, capability)[-1])
        return {"capability": capability, "adapter": adapter, "summary": adapter}

    _on_capabilities(settings, Step("adapters", "admitted", work, "traced evaluate", "train"), capabilities, as_json)


def evaluate(
    capabilities: Capabilities = None,
    *,
    base: Annotated[
        bool, typer.Option("--base", help="Play the test split with the base model instead; needs no adapter.")
    ] = False,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run the gate of each trained adapter: compare it with the base model on the same seeds."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, engine__threads=threads)
    if base:
        _evaluate_base(settings, as_json)
        return

    async def work(context: Context, capability: str) -> dict[str, Any]:
        adapter = adapters(context, capability)[-1]
        result = await gate(context, adapter)
        return {"capability": capability, "gate": result, "summary": f"{adapter} passed: {figures_of(result)}"}

    _on_capabilities(
        settings,
        Step("gates", "trained", work, "traced compose, or traced approve ADAPTER", "gate"),
        capabilities,
        as_json,
    )


def _evaluate_base(settings: Settings, as_json: bool) -> None:
    """Print the success rates of the base model and of doing nothing on the test split."""
    check_playable(target(settings))
    check, rates = on_cycle(settings, evaluate_base, create=True)
    if as_json:
        print_json({"test": rates, "self_check": check})
        return
    console.print(f"{settings.target.name}: {check.text}", highlight=False)
    for figures in rates:
        console.print(
            f"{figures.name}: {100 * figures.rate:.1f} % of {figures.episodes} test episodes succeeded "
            f"[{100 * figures.low:.1f}, {100 * figures.high:.1f}], {figures.infrastructure} lost to infrastructure",
            highlight=False,
        )


@dataclass(frozen=True)
class Step:
    """A stage that a command runs; its results are listed under ``key``, and ``next_step`` is the next command."""

    key: str
    applies_to: str  # required status of a capability: "retained", "written", "admitted" or "trained"
    work: Callable[[Context, str], Awaitable[dict[str, Any]]]
    next_step: str
    stage: str


def _on_capabilities(settings: Settings, step: Step, names: Sequence[str] | None, as_json: bool) -> None:
    """Run the step for the named capabilities, by default for all with the required status, and report failed ones.

    Raises typer.Exit, with exit code 1 if the step succeeded for no capability.
    """
    report = on_cycle(settings, lambda context: _do(context, step, names or []))
    if as_json:
        results = [{key: value for key, value in entry.items() if key != "summary"} for entry in report[step.key]]
        print_json({**report, step.key: results})
    else:
        for entry in report[step.key]:
            console.print(f"{entry['capability']}: {entry['summary']}", highlight=False)
        for entry in report["failed"]:
            hint = f" (try: {entry['hint']})" if entry["hint"] else ""
            console.print(f"{entry['capability']} failed: {entry['reason']}{hint}", highlight=False)
        # Otherwise each failure has said what to do.
        if report[step.key]:
            console.print(f"Next: {step.next_step}", highlight=False)
        elif not all(entry["hint"] for entry in report["failed"]):
            console.print("Next: traced status", highlight=False)
    raise typer.Exit(0 if report[step.key] else 1)


async def _do(context: Context, step: Step, names: Sequence[str]) -> dict[str, Any]:
    possible = applicable(context, step.applies_to)
    unknown = [name for name in names if name not in possible]
    if unknown:
        earlier = _missing_step(context, unknown[0])
        raise TracedError(
            f"{unknown[0]!r} is not a capability whose status is {step.applies_to}",
            hint=earlier or (f"one of: {', '.join(possible)}" if possible else "traced analyze shows the capabilities"),
        )
    if not possible:
        retained = applicable(context, "retained")
        raise TracedError(
            f"cycle {context.cycle_id} has no capability whose status is {step.applies_to}",
            hint=(_missing_step(context, retained[0]) if retained else "") or "traced analyze",
        )
    results, failures = [], []
    for name in names or possible:
        try:
            results.append(await step.work(context, name))
        except CapabilityError as error:
            context.event(step.stage, StageState.FAILED, name, reason=str(error))
            failures.append({"capability": name, "reason": error.message, "hint": error.hint})
    return {"cycle": context.cycle_id, step.key: results, "failed": failures}


def _missing_step(context: Context, capability: str) -> str:
    """Return the first command that a capability of the cycle has not passed yet, "" for any other name."""
    steps = (("written", "synthesize"), ("admitted", "admit"), ("trained", "train"))
    if capability not in applicable(context, "retained"):
        return ""
    verb = next((verb for kind, verb in steps if capability not in applicable(context, kind)), "")
    return f"traced {verb} {capability}" if verb else ""


def _newest_admitted(context: Context, capability: str) -> str:
    """Return the newest admitted environment of a capability; raises ``TracedError`` if there is none."""
    retained = applicable(context, "retained")
    if not retained:
        raise TracedError(f"cycle {context.cycle_id} has no retained capability", hint="traced analyze")
    if capability not in retained:
        raise TracedError(
            f"{capability!r} is not a retained capability of cycle {context.cycle_id}",
            hint=f"one of: {', '.join(retained)}",
        )
    candidates = admitted_environments(context, capability)
    if not candidates:
        next_step = "admit" if environments(context, capability) else "synthesize"
        raise TracedError(
            f"{capability} has no admitted environment, which prompt optimization needs",
            hint=f"traced {next_step} {capability}",
        )
    return candidates[-1]
