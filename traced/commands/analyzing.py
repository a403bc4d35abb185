"""The verb analyze: which capabilities the failures lack, by one analyst, or by two side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from traced.commands.options import AsJson, DataDir, Given, Model, Seed, read_settings
from traced.commands.output import bounded, console, print_json, progress

if TYPE_CHECKING:
    from agents.analyst.llm.asking import Tell
    from store.records import Cycle, Finding
    from traced.config import Settings
    from traced.stages.analyses import Comparison
    from traced.stages.context import Context

ANALYSTS = ("builtin", "llm")
T = TypeVar("T")


def analyze(
    *,
    analyst: Annotated[
        str | None, typer.Option("--analyst", metavar="|".join(ANALYSTS), help="Who analyses.", show_default=False)
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option("--compare", metavar=",".join(ANALYSTS), help="Show both; store nothing.", show_default=False),
    ] = None,
    data_dir: DataDir = None,
    given: Given = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Find the capabilities that failures lack, in what was collected or imported last."""
    settings = read_settings(data_dir, given, model__spec=model, seed=seed, analysis__analyst=analyst)
    if compare is not None:
        if analyst is not None:
            raise typer.BadParameter("goes without --analyst", param_hint="--compare")
        _show_both(*_compared(settings, _both(compare)), as_json)
        return
    cycle, findings = _imported(settings) or _collected(settings)
    if as_json:
        print_json(
            {"cycle": cycle, "analyst": settings.analysis.analyst, "capabilities": findings, **_said(settings, cycle)}
        )
        return
    _table(f"Capabilities of cycle {cycle}", {settings.analysis.analyst: findings})
    kept = [finding.capability for finding in findings if finding.retained]
    console.print(f"Lacking: {', '.join(kept) or 'nothing that the contrast keeps'}", highlight=False)


def _both(told: str) -> list[str]:
    names = [name.strip() for name in told.split(",")]
    if sorted(names) != sorted(ANALYSTS):
        raise typer.BadParameter(f"{told!r} is not {','.join(ANALYSTS)}", param_hint="--compare")
    return names


def _newest_import(settings: "Settings") -> "Cycle | None":
    """The newest cycle, where it holds imports; None when episodes were collected since, or nothing was imported."""
    from store.repositories.cycles import list_cycles
    from traced.commands.stored import writing
    from traced.imported import is_import

    with writing(settings) as session:
        newest = next(iter(list_cycles(session, limit=1)), None)
    return newest if newest is not None and is_import(newest) else None


def _imported(settings: "Settings") -> "tuple[str, list[Finding]] | None":
    """The analysis of the newest import."""
    from traced.commands.stored import opened_store
    from traced.imported import analyze_imported

    newest = _newest_import(settings)
    if newest is None:
        return None
    with opened_store(settings) as store:
        cycle, findings = _shown(lambda tell: analyze_imported(store, settings, newest, datetime.now(UTC), tell))
    return cycle.id, findings


def _shown(work: "Callable[[Tell], Awaitable[T]]") -> T:
    """Work on imports, with live progress."""
    from traced.progress import Progress

    async def run() -> T:
        shown.start("analyze", "Analyze successes against failures")
        answer = await work(lambda what, done, of: shown.advance("analyze", 0, f"{what}: {done} of {of}"))
        shown.finish("analyze")
        return answer

    shown = Progress(progress)
    with shown.shown():
        return asyncio.run(run())


def _collected(settings: "Settings") -> "tuple[str, list[Finding]]":
    from traced.commands.current import on_cycle, to_be_analyzed
    from traced.stages.analyze import analyze as station
    from traced.stages.analyze import stored_findings

    async def work(context: "Context") -> "tuple[str, list[Finding]]":
        await station(context)
        return context.cycle_id, stored_findings(context)

    return on_cycle(settings, work, find=to_be_analyzed)


def _compared(settings: "Settings", analysts: Sequence[str]) -> "tuple[str, Comparison]":
    from traced.commands.current import collected_alike, on_cycle
    from traced.commands.stored import opened_store
    from traced.imported import contrasting
    from traced.stages.analyses import compare
    from traced.stages.analysts import Surroundings
    from traced.stages.analyze import surroundings, telling, to_analyze
    from traced.stages.context import Shown

    async def work(context: "Context") -> "tuple[str, Comparison]":
        shown = Shown(context.progress, "compare")
        context.progress.start(shown.key, "Compare analysts")
        told = await compare(surroundings(context), to_analyze(context), analysts, telling(shown))
        context.progress.finish(shown.key)
        return context.cycle_id, told

    newest = _newest_import(settings)
    if newest is None:
        return on_cycle(settings, work, find=collected_alike)
    with opened_store(settings) as store:
        around = Surroundings(settings, store, newest.id, newest.target)
        trajectories = contrasting(store, newest)
        return newest.id, _shown(lambda tell: compare(around, trajectories, analysts, tell))


def _said(settings: "Settings", cycle: str) -> dict[str, Any]:
    """What an analyst that cites and blames has said, where it has."""
    from store.repositories.thinking import list_citations, list_faults
    from traced.commands.stored import looking

    with looking(settings) as session:
        cited, faults = list_citations(session, cycle), list_faults(session, cycle)
    told: dict[str, Any] = {}
    if cited:
        told["citations"] = [
            {"capability": one.capability, "trajectory": one.trajectory_id, "message": one.message_index}
            for one in cited
        ]
    if faults:
        told["faults"] = [
            {"trajectory": one.trajectory_id, "fault": one.fault, "message": one.message_index, "reason": one.reason}
            for one in faults
        ]
    return told


def _show_both(cycle: str, found: "Comparison", as_json: bool) -> None:
    if as_json:
        print_json({"cycle": cycle, "comparison": found})
        return
    _table(
        f"Two analysts on the {found.trajectories} trajectories of cycle {cycle}",
        {side.analyst: side.findings for side in found.sides},
    )
    for side in found.sides:
        if side.spared:
            told = f"{side.analyst} holds others than the agent at fault for {len(side.spared)} failures"
            console.print(f"{told}, and mines them not: {_some(side.spared)}", highlight=False)
    for analyst, names in found.only.items():
        console.print(f"Only {analyst}: {', '.join(names) or 'none'}", highlight=False)
    for one in found.differences:
        first, second = one.analysts
        told = "; ".join(f"{each['trajectory']}: {each[first]} / {each[second]}" for each in one.examples)
        said = f"{one.capability}: {one.differ} of {one.both} trajectories are labelled otherwise by {first} / {second}"
        console.print(f"{said}{', such as ' + told if told else ''}", highlight=False)


def _some(ids: Sequence[str], most: int = 3) -> str:
    return ", ".join(ids[:most]) + (f" and {len(ids) - most} more" if len(ids) > most else "")


def _table(title: str, by_analyst: "dict[str, list[Finding]]") -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    several = len(by_analyst) > 1
    columns = ("capability", "gap", "coverage", "runs agreeing", "alpha", "retained")
    for column in ("analyst", *columns) if several else columns:
        table.add_column(column)
    for analyst, findings in by_analyst.items():
        for one in findings:
            gap = bounded(one.delta, one.delta_low, one.delta_high)
            coverage = bounded(one.coverage, one.coverage_low, one.coverage_high)
            alpha = "undefined" if one.agreement is None else f"{one.agreement:.2f}"
            told = [one.capability, gap, coverage, f"{one.runs_agreeing} of {one.runs}", alpha]
            table.add_row(*([analyst] if several else []), *told, "yes" if one.retained else "no")
    console.print(table)
