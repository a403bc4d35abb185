"""The verb analyze: which capabilities the failures lack, by one analyst, or by two side by side.

On the terminal a capability's name is never cut; ids of trajectories are, as everywhere: ``--json`` has them whole.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from agents.analyst.llm.prompting import Tell
from sandbox.errors import harmless
from store.records import Citation, Cycle, FaultRecord, Finding
from store.repositories.capabilities import list_capabilities
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.llm_replies import list_citations, list_faults
from traced.cli.current_cycle import collected_alike, on_cycle, to_be_analyzed
from traced.cli.options import AsJson, DataDir, Given, Model, Seed, read_settings
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import looking, opened_store, writing
from traced.config.settings import Settings
from traced.core.progress import Progress
from traced.pipeline.analyze import analyze as analyze_stage
from traced.pipeline.analyze import (
    analyze_imported,
    contrasting,
    is_import,
    stored_findings,
    surroundings,
    telling,
    to_analyze,
)
from traced.pipeline.context import Context, Shown
from traced.pipeline.findings import Comparison, Difference, Surroundings
from traced.pipeline.findings import compare as compare_analysts

ID = 16  # characters of a trajectory's id
SOME = 3
MINED, LEFT_OUT = "mined", "left out"  # among a model's figures
WHY_DROPPED = "they cite no message that exists, lack a name or a text, or were too many"
OTHERS = {"simulator": "the user's", "infrastructure": "the infrastructure's", "task": "an ambiguous task's"}


@dataclass(frozen=True)
class Said:
    """What is stored of an analysis beside its findings; ``descriptions`` by capability, ``figures`` of a model."""

    descriptions: Mapping[str, str]
    citations: Sequence[Citation]
    faults: Sequence[FaultRecord]
    figures: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What an analyst that cites and blames has said, where it has."""
        cited = [
            {"capability": one.capability, "trajectory": one.trajectory_id, "message": one.message_index}
            for one in self.citations
        ]
        faults = [
            {"trajectory": one.trajectory_id, "fault": one.fault, "message": one.message_index, "reason": one.reason}
            for one in self.faults
        ]
        left_out = [{"trajectory": key, "reason": why} for key, why in self.figures.get(LEFT_OUT, {}).items()]
        told: dict[str, list[Any]] = {"citations": cited, "faults": faults, "left_out": left_out}
        figures = {name: figure for name, figure in self.figures.items() if name != LEFT_OUT}
        return {name: of for name, of in {**told, "figures": figures}.items() if of}


def said(settings: Settings, cycle: str) -> Said:
    """What the store holds of a cycle's analysis."""
    with looking(settings) as session:
        descriptions = {row.name: row.description for row in list_capabilities(session, cycle)}
        citations, faults = list_citations(session, cycle), list_faults(session, cycle)
        details = [event.detail for event in list_stage_events(session, cycle) if event.stage == "analyze"]
    return Said(descriptions, citations, faults, next((detail for detail in reversed(details) if MINED in detail), {}))


def show_analysis(cycle: str, analyst: str, findings: Sequence[Finding], told: Said) -> None:
    """One analyst's capabilities, what the retained ones are and rest on, and whose fault the failures were."""
    _table(f"Capabilities of cycle {cycle}, by the {analyst} analyst", findings)
    kept = [finding.capability for finding in findings if finding.retained]
    _say(f"Lacking: {', '.join(kept) or 'nothing that the contrast keeps'}")
    for name in kept:
        places = [(one.trajectory_id, one.message_index) for one in told.citations if one.capability == name]
        rests = f" Seen in {_some([f'message {index} of {key[:ID]}' for key, index in places])}." if places else ""
        _say(f"  {name}: {told.descriptions.get(name, '')}{rests}")
    _print_figures({**told.figures, "faults": Counter(one.fault for one in told.faults)})


def show_comparison(cycle: str, found: Comparison) -> None:
    """Both analysts' capabilities, then where they differ."""
    for side in found.sides:
        _table(f"The {side.analyst} analyst on the {found.trajectories} trajectories of cycle {cycle}", side.findings)
        _print_figures(side.figures)
        console.print()
    for line in _where_they_differ(found):
        _say(line)


def _where_they_differ(found: Comparison) -> Iterator[str]:
    kept = {side.analyst: {one.capability for one in side.findings if one.retained} for side in found.sides}
    both = sorted(set.intersection(*kept.values()))
    yield f"Retained by both: {', '.join(both) or 'none'}"
    for analyst, names in kept.items():
        yield f"Retained by {analyst} only: {', '.join(sorted(names - set(both))) or 'none'}"
    for analyst, found_only in found.only.items():
        yield f"Found by {analyst} only: {', '.join(found_only) or 'none'}"
    for one in found.differences:
        yield from _difference(one)


def _difference(one: Difference) -> Iterator[str]:
    first, second = one.analysts
    such = ", such as" if one.examples else ""
    yield f"{one.capability}: labelled differently in {one.differ} of {one.both} trajectories{such}"
    for each in one.examples:
        yield f"  {each['trajectory'][:ID]}: {first} says {each[first].upper()}, {second} {each[second].upper()}"


def _print_figures(figures: Mapping[str, Any]) -> None:
    """What a model could not do, and what became of it; nothing of what went as it should."""
    if faults := figures.get("faults"):
        _say(f"Failures: {_blamed(faults)}")
    if unsaid := figures.get("faults nobody said"):
        _say(f"  {unsaid} of these only because nobody said whose fault it was")
    if lacking := figures.get("no contrast"):
        _say(f"Nothing to contrast: {lacking}.")
    if unusable := figures.get("unusable parts"):
        _say(f"Of {figures['parts']} parts of the sample {unusable} had no usable answer.")
    if dropped := figures.get("named", 0) - figures.get("with evidence", 0):
        _say(f"Of {figures['named']} capabilities that the model named {dropped} were dropped: {WHY_DROPPED}.")
    if left_out := figures.get(LEFT_OUT):
        which = f"{len(left_out)} that could not be labelled ({_some([key[:ID] for key in left_out])})"
        _say(f"Left out: {which}. About the first, {next(iter(left_out.values()))}")


def _blamed(faults: Mapping[str, int]) -> str:
    others = ", ".join(f"{faults[party]} {whose}" for party, whose in OTHERS.items() if faults.get(party))
    own = f"{faults.get('agent', 0)} the agent's fault"
    return f"{own}; not mined: {others}" if others else f"{own}, all of them"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SOME]) + (f" and {len(names) - SOME} more" if len(names) > SOME else "")


def _table(title: str, findings: Sequence[Finding]) -> None:
    if not findings:
        _say(f"{title}: none")
        return
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False)
    table.pad_edge, table.collapse_padding = False, True  # a name of 26 letters fits 80 columns
    table.add_column("capability", overflow="fold")
    for column in ("gap", "coverage", "runs", "alpha", "retained"):
        table.add_column(column, no_wrap=True)
    for one in findings:
        gap = _bounded(one.delta, one.delta_low, one.delta_high)
        coverage = _bounded(one.coverage, one.coverage_low, one.coverage_high)
        alpha = "-" if one.agreement is None else _figure(one.agreement)
        runs = f"{one.runs_agreeing}/{one.runs}"
        table.add_row(one.capability, gap, coverage, runs, alpha, "yes" if one.retained else "no")
    console.print(table)


def _bounded(value: float | None, low: float | None, high: float | None) -> str:
    """A figure over its interval, where it has one."""
    if value is None:
        return "undefined"
    return _figure(value) + (f"\n[{_figure(low)}, {_figure(high)}]" if low is not None and high is not None else "")


def _figure(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no minus before what is rounded to nothing


def _say(line: str) -> None:
    console.print(harmless(line), highlight=False, markup=False)


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
        cycle, comparison = _compared(settings, _both(compare))
        if as_json:
            print_json({"cycle": cycle, "comparison": comparison})
        else:
            show_comparison(cycle, comparison)
        return
    cycle, findings = _imported(settings) or _collected(settings)
    record = said(settings, cycle)
    analyst = settings.analysis.analyst
    if as_json:
        print_json({"cycle": cycle, "analyst": analyst, "capabilities": findings, **record.as_json()})
        return
    show_analysis(cycle, analyst, findings, record)


def _both(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if sorted(names) != sorted(ANALYSTS):
        raise typer.BadParameter(f"{text!r} is not {','.join(ANALYSTS)}", param_hint="--compare")
    return names


def _newest_import(settings: Settings) -> Cycle | None:
    """The newest cycle, where it holds imports; None when episodes were collected since, or nothing was imported."""
    with writing(settings) as session:
        newest = next(iter(list_cycles(session, limit=1)), None)
    return newest if newest is not None and is_import(newest) else None


def _imported(settings: Settings) -> tuple[str, list[Finding]] | None:
    """The analysis of the newest import."""
    newest = _newest_import(settings)
    if newest is None:
        return None
    with opened_store(settings) as store:
        cycle, findings = _with_progress(
            lambda tell: analyze_imported(store, settings, newest, datetime.now(UTC), tell)
        )
    return cycle.id, findings


def _with_progress(work: Callable[[Tell], Awaitable[T]]) -> T:
    """Work on imports, with live progress."""

    async def run() -> T:
        shown.start("analyze", "Analyze successes against failures")
        answer = await work(telling(Shown(shown, "analyze")))
        shown.finish("analyze")
        return answer

    shown = Progress(progress)
    with shown.shown():
        return asyncio.run(run())


def _collected(settings: Settings) -> tuple[str, list[Finding]]:
    async def work(context: Context) -> tuple[str, list[Finding]]:
        await analyze_stage(context)
        return context.cycle_id, stored_findings(context)

    return on_cycle(settings, work, find=to_be_analyzed)


def _compared(settings: Settings, analysts: Sequence[str]) -> tuple[str, Comparison]:
    async def work(context: Context) -> tuple[str, Comparison]:
        shown = Shown(context.progress, "compare")
        context.progress.start(shown.key, "Compare analysts")
        comparison = await compare_analysts(surroundings(context), to_analyze(context), analysts, telling(shown))
        context.progress.finish(shown.key)
        return context.cycle_id, comparison

    newest = _newest_import(settings)
    if newest is None:
        return on_cycle(settings, work, find=collected_alike)
    with opened_store(settings) as store:
        context = Surroundings(settings, store, newest.id, newest.target)
        trajectories = contrasting(store, newest)
        return newest.id, _with_progress(lambda tell: compare_analysts(context, trajectories, analysts, tell))
