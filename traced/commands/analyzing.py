"""The verb analyze: which capabilities the failures lack, by one analyst, or by two side by side."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from traced.commands.analyses import said, show_analysis, show_comparison
from traced.commands.options import AsJson, DataDir, Given, Model, Seed, read_settings
from traced.commands.output import print_json, progress

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
        on, found = _compared(settings, _both(compare))
        if as_json:
            print_json({"cycle": on, "comparison": found})
        else:
            show_comparison(on, found)
        return
    cycle, findings = _imported(settings) or _collected(settings)
    told = said(settings, cycle)
    if as_json:
        print_json({"cycle": cycle, "analyst": settings.analysis.analyst, "capabilities": findings, **told.as_json()})
        return
    show_analysis(cycle, settings.analysis.analyst, findings, told)


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
    from traced.stages.analyze import telling
    from traced.stages.context import Shown

    async def run() -> T:
        shown.start("analyze", "Analyze successes against failures")
        answer = await work(telling(Shown(shown, "analyze")))
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
