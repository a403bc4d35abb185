"""The command ``traced demo``: full cycles on a target with its model, from the first episode to the report.

Invariants: the same command resumes an unfinished cycle from its last checkpoint. No approval is silent: ``--yes``
prints each approval; on a terminal the person is asked and sees the gate's figures; without a terminal, or with
``--keep``, the demo stops and names the next command. Ctrl-C is raised as KeyboardInterrupt after the children have
ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.prompt import Confirm

from sandbox.client import reap_orphans
from sandbox.image import ensure_image
from store.database import open_store, read_session, write_session
from store.records import Cycle, CycleState
from store.repositories.cycles import fallen_versions, list_cycles, pause_target, set_cycle_state
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, Threads, read_settings
from traced.cli.output import console, print_json, progress
from traced.config.settings import Settings, configuration, with_defaults
from traced.core.errors import TracedError
from traced.core.ownership import CYCLE_LOCK, hold_directory, sandbox_owner
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.evaluation.figures import ON_TARGET, CycleFigures
from traced.evaluation.figures import as_json as figures_as_json
from traced.evaluation.report import cycles_table, prompt_sentence, summary_table, write_report
from traced.inference.model_files import base_model
from traced.pipeline.context import Context, open_context, utc_now
from traced.pipeline.cycles import find_cycle
from traced.pipeline.evaluate import COMPARISON, TRAINING, TYPICAL_CAPABILITIES, expected_comparison_s, grpo_on_target
from traced.pipeline.gate import figures_of, stored_gate
from traced.pipeline.preflight import check_cycle
from traced.pipeline.promote import decide
from traced.pipeline.report import gather
from traced.targets.bundled import BUNDLED
from traced.targets.registry import check_playable, full_name, target

COMPARISON_KEY = "grpo_on_target"


class Engine(StrEnum):
    """A backend that can run a whole cycle."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line; ``console`` shows progress and questions (stderr)."""

    settings: Settings
    console: Console
    yes: bool = False
    compare: bool = False
    keep: bool = False  # keep the result for inspection: ask nothing, and pause the target at the end
    cycles: int = 1  # finished cycles to reach; with 1 another cycle is run each time


@dataclass(frozen=True)
class DemoResult:
    """Result of the demo; ``waiting`` names the adapters that await a decision, empty if the cycle is finished."""

    cycle_id: str
    figures: CycleFigures
    report: Path | None
    waiting: list[str]
    summaries: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the finished cycles, oldest first


def run_demo(options: DemoOptions) -> DemoResult:
    """Run or resume the cycle; raises TracedError, StoreError, SandboxError, AgentsError or KeyboardInterrupt."""
    with hold_directory(options.settings.data_dir, now=utc_now, version=version("traced"), file_name=CYCLE_LOCK):
        return _run_exclusively(options)


def _run_exclusively(options: DemoOptions) -> DemoResult:
    check_cycle(options.settings)
    ensure_image(build_missing=True)
    reap_orphans(sandbox_owner(options.settings.data_dir))
    result = _run_cycle(options)
    while result.report is not None and len(_finished(options)) < options.cycles:
        result = _run_cycle(options)
    if options.keep:
        _pause(options.settings)
    summaries = {cycle.id: cycle.summary for cycle in reversed(_finished(options))}
    return replace(result, summaries=summaries)


def _run_cycle(options: DemoOptions) -> DemoResult:
    """Run or resume one cycle."""
    cycle = _cycle(options)
    progress = Progress(options.console)
    if options.compare:
        expected_s = expected_comparison_s(options.settings, TYPICAL_CAPABILITIES)
        progress.plan(f"train {ON_TARGET}", COMPARISON, expected_s, TRAINING)
    with Meter() as meter, progress.display():
        result = asyncio.run(_run(options, cycle.id, progress, meter))
        while result.waiting and options.console.is_terminal and not options.keep:
            with progress.suspended():
                if not _ask(options, result):
                    break
            result = asyncio.run(_run(options, cycle.id, progress, meter))
    return result


def _finished(options: DemoOptions) -> list[Cycle]:
    """Return the finished cycles of this target, model, seed and configuration, newest first."""
    settings = options.settings
    model, config = base_model(settings).name, configuration(settings)
    store = open_store(settings.store_url)
    try:
        with read_session(store) as opened_session:
            cycles = list_cycles(opened_session, target=settings.target.name, states=[CycleState.FINISHED])
    finally:
        store.dispose()
    return [
        cycle
        for cycle in cycles
        if (cycle.model, cycle.seed) == (model, settings.seed) and with_defaults(cycle.config) == config
    ]


def _pause(settings: Settings) -> None:
    """Pause the target, so that a service begins no cycle until a person resumes it."""
    store = open_store(settings.store_url)
    try:
        with write_session(store) as opened_session:
            pause_target(opened_session, settings.target.name, actor="traced demo --keep", at=utc_now())
    finally:
        store.dispose()


async def _run(options: DemoOptions, cycle_id: str, progress: Progress, meter: Meter) -> DemoResult:
    # Imported here because it loads langgraph, which takes a second.
    from traced.pipeline.runner import run_cycle

    async with open_context(options.settings, cycle_id, progress, meter) as context:
        result = await run_cycle(context, _approver(options))
        figures = gather(context)
        if result.finished and options.compare and len(_finished(options)) >= options.cycles:
            figures = await _run_direct_training(options, context, figures)
        page = context.run_dir / "report.html"
        return DemoResult(cycle_id, figures, page if result.finished else None, result.waiting)


def _cycle(options: DemoOptions) -> Cycle:
    """Return the cycle to work on; with ``compare`` also a finished cycle that was not compared yet."""
    settings = options.settings
    if options.compare:
        check_playable(target(settings))
    model = base_model(settings)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    is_complete = len(_finished(options)) >= options.cycles
    store = open_store(settings.store_url)

    def is_accepted(cycle: Cycle) -> bool:
        """Whether the last of all cycles that were asked for is shown, or compared, again."""
        if cycle.state is not CycleState.FINISHED or not is_complete:
            return False
        return options.cycles > 1 or (options.compare and cycle.summary.get(COMPARISON_KEY) is None)

    try:
        with write_session(store) as opened_session:
            return find_cycle(opened_session, settings, model.name, at=utc_now(), accepts=is_accepted)
    finally:
        store.dispose()


def _approver(options: DemoOptions) -> Callable[[Context, Sequence[str]], bool]:
    def approve(context: Context, adapters: Sequence[str]) -> bool:
        if not options.yes:
            return False
        with context.read_session() as session:
            fallen = fallen_versions(session, context.cycle_id)
        if fallen:
            context.progress.note(
                f"--yes approves nothing: the live system has fallen in the environments of {', '.join(fallen)}"
            )
            return False
        for adapter in adapters:
            context.progress.note(f"--yes: {adapter} is approved automatically ({_gate_line(context, adapter)})")
            decide(context, adapter, True, actor="traced demo --yes", reason="approved automatically by --yes")
        return True

    return approve


def _ask(options: DemoOptions, result: DemoResult) -> bool:
    """Ask for a decision on every waiting adapter and store the answers; False if standard input has ended."""
    gates = {adapter.name: adapter.gate for adapter in result.figures.adapters}
    answers: dict[str, bool] = {}
    for name in result.waiting:
        gate = gates[name]
        options.console.print(f"\n{name} passed its gate: {figures_of(gate) if gate else ''}", highlight=False)
        for prompt in result.figures.prompts:
            if prompt.capability == name.partition("@")[0]:
                options.console.print(prompt_sentence(prompt), highlight=False, markup=False)
        try:
            answers[name] = Confirm.ask(f"Promote {name}?", console=options.console, default=False)
        except EOFError:
            return False
    return _record(options.settings, result.cycle_id, answers)


def _record(settings: Settings, cycle_id: str, answers: dict[str, bool]) -> bool:
    async def write() -> None:
        async with open_context(settings, cycle_id, Progress(Console(quiet=True)), Meter()) as context:
            for name, approved in answers.items():
                decide(context, name, approved, actor="traced demo", reason="decided on the terminal")

    asyncio.run(write())
    return True


def _gate_line(context: Context, adapter: str) -> str:
    result = stored_gate(context, adapter)
    return figures_of(result) if result else "no gate result"


async def _run_direct_training(options: DemoOptions, context: Context, figures: CycleFigures) -> CycleFigures:
    """Train GRPO directly on the target; update report and cycle row, and return the figures with this comparison.

    It has as many rollouts as the adapters of all cycles together.
    """
    rollouts = figures.rollouts
    if options.cycles > 1:
        rollouts = sum(cycle.summary.get("rollouts", 0) for cycle in _finished(options))
    if not rollouts:
        context.progress.note(
            "--compare is skipped: no adapter was trained, so the number of rollouts to match is unknown"
        )
        return figures
    await grpo_on_target(context, rollouts)
    cycle_figures = gather(context)
    write_report(cycle_figures, context.run_dir)
    with context.write_session() as session:
        set_cycle_state(
            session, context.cycle_id, CycleState.FINISHED, at=context.now(), summary=figures_as_json(cycle_figures)
        )
    return cycle_figures


def demo(
    *,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Approve each adapter that passes its gate, without a question.")
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Also train GRPO directly on the target, with the same number of rollouts."),
    ] = False,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Leave decisions open and pause the target, to inspect the result with traced up and traced tui.",
        ),
    ] = False,
    cycles: Annotated[
        int, typer.Option("--cycles", min=1, help="Number of cycles; each begins with what the one before made live.")
    ] = 1,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="Target, e.g. textworld:quest; a bundled one brings its model.", show_default=False
        ),
    ] = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    engine: Annotated[
        Engine | None, typer.Option("--engine", help="Inference engine of all stages.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run full cycles, or resume a stopped one, and print the success rates before and after."""
    if yes and keep:
        raise TracedError(
            "--yes and --keep exclude each other", hint="use one of them: --yes approves, --keep leaves decisions open"
        )
    backend = engine.value if engine else None
    options = {"target__name": target, "seed": seed, "engine__threads": threads, "engine__backend": backend}
    settings = read_settings(data_dir, overrides, model__spec=model, **options)
    if target and not settings.target.kind:
        options["target__name"] = full_name(target, settings.data_dir)
        settings = read_settings(data_dir, overrides, model__spec=model, **options)
    bundled = BUNDLED.get(settings.target.name)
    if bundled is not None and bundled.model and "spec" not in settings.model.model_fields_set:
        settings = read_settings(data_dir, overrides, model__spec=bundled.model, **options)
    result = run_demo(DemoOptions(settings, progress, yes, compare, keep, cycles))
    if not as_json:
        console.print(summary_table(result.figures))
        if len(result.summaries) > 1:
            console.print(cycles_table(result.summaries))
        for name in result.waiting:
            console.print(f"Decision pending: traced explain {name}, then traced approve {name}", highlight=False)
        if result.report:
            console.print(f"Report: {result.report}", highlight=False)
        else:
            console.print("Run the same command after the decision; it resumes the cycle.", highlight=False)
        if keep:
            option = f" --data-dir {data_dir}" if data_dir else ""
            commands = f"traced up{option} in one terminal, traced tui{option} in another"
            console.print(
                f"To inspect the result: {commands}. The target is paused; traced resume starts cycles again.",
                highlight=False,
            )
    if as_json:
        waiting = {"waiting": result.waiting} if result.waiting else {}
        steps = [{"cycle": key, **summary.get("step", {})} for key, summary in result.summaries.items()]
        print_json({**figures_as_json(result.figures), **waiting, **({"cycles": steps} if len(steps) > 1 else {})})
