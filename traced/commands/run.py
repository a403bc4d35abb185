"""Verbs that begin with trajectories: demo (the whole cycle), analyze."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Seed, Threads, read_settings
from traced.commands.output import console, print_json, progress
from traced.errors import TracedError

if TYPE_CHECKING:
    from store.records import Finding
    from traced.config import Settings


def demo(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Approve what passes its gate, and say so.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Add GRPO directly on the target with as many rollouts.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Decide nothing, and leave everything for traced up and traced tui to show.")
    ] = False,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Run one full cycle, or carry on the one that was stopped, and show what it won."""
    from traced.demo import DemoOptions, run_demo
    from traced.figures import as_json as told
    from traced.report import summary_table

    if yes and keep:
        raise TracedError("--yes decides and --keep leaves the decision to you", hint="leave one of them out")
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, engine__threads=threads)
    result = run_demo(DemoOptions(settings, progress, yes, compare, keep))
    if not as_json:
        console.print(summary_table(result.figures))
        for name in result.waiting:
            console.print(f"Waits for a decision: traced explain {name}, then traced approve {name}", highlight=False)
        if result.report:
            console.print(f"Report: {result.report}", highlight=False)
        else:
            console.print("The same command carries on after the decision.", highlight=False)
        if keep:
            where = f" --data-dir {data_dir}" if data_dir else ""
            look = f"traced up{where} in one terminal, traced tui{where} in another"
            console.print(f"To look at all of it: {look}. Nothing begins until traced resume.", highlight=False)
    if as_json:
        waiting = {"waiting": result.waiting} if result.waiting else {}
        print_json({**told(result.figures), **waiting})


def analyze(
    *,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Find the capabilities that failures lack, in what was collected or imported last."""
    settings = read_settings(data_dir, given, model__spec=model, seed=seed)
    cycle, findings = _imported(settings) or _collected(settings)
    if as_json:
        print_json({"cycle": cycle, "capabilities": findings})
        return
    _table(cycle, findings)
    kept = [finding.capability for finding in findings if finding.retained]
    console.print(f"Lacking: {', '.join(kept) or 'nothing that the contrast keeps'}", highlight=False)


def _imported(settings: "Settings") -> "tuple[str, list[Finding]] | None":
    """The analysis of the newest import; None when episodes were collected since, or nothing was imported."""
    from store.repositories.cycles import list_cycles
    from traced.commands.stored import writing
    from traced.imported import analyze_imported, is_import

    with writing(settings) as session:
        newest = next(iter(list_cycles(session, limit=1)), None)
        if newest is None or not is_import(newest):
            return None
        cycle, findings = analyze_imported(session, settings, newest, datetime.now(UTC))
        return cycle.id, findings


def _collected(settings: "Settings") -> "tuple[str, list[Finding]]":
    from traced.commands.current import on_cycle
    from traced.stages.analyze import analyze as station
    from traced.stages.analyze import stored_findings
    from traced.stages.context import Context

    async def work(context: Context) -> "tuple[str, list[Finding]]":
        await station(context)
        return context.cycle_id, stored_findings(context)

    return on_cycle(settings, work)


def _table(cycle: str, findings: "list[Finding]") -> None:
    from rich.table import Table

    table = Table(title=f"Capabilities of cycle {cycle}", title_justify="left")
    for column in ("capability", "gap", "coverage", "runs agreeing", "retained"):
        table.add_column(column)
    for one in findings:
        figures: list[Any] = [one.delta, one.coverage]
        shown = ["undefined" if figure is None else f"{figure:.2f}" for figure in figures]
        table.add_row(one.capability, *shown, f"{one.runs_agreeing} of {one.runs}", "yes" if one.retained else "no")
    console.print(table)
