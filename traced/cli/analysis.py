"""The command ``traced analyze``: find the capabilities that failed trajectories lack, or compare two analysts.

The terminal output shortens ids of trajectories but never names of capabilities; ``--json`` has the complete ids.
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

from agents.analyst.llm.prompting import ProgressCallback
from agents.contrast import MIN_MIXED, MIN_SHARE
from sandbox.errors import harmless
from store.records import WITHIN_TASKS, Citation, Cycle, FaultRecord, Finding
from store.repositories.capabilities import list_capabilities
from store.repositories.cycles import list_cycles, list_stage_events
from store.repositories.llm_replies import list_citations, list_faults
from traced.cli.current_cycle import collected_alike, on_cycle, to_be_analyzed
from traced.cli.options import AsJson, DataDir, Model, Overrides, Seed, read_settings, repeated
from traced.cli.output import console, print_json, progress
from traced.cli.store_session import opened_store, store_reader, writing
from traced.config.settings import Settings
from traced.core.progress import Progress
from traced.evaluation.figures import missing_contrast
from traced.pipeline.analyze import (
    analysis_context,
    analyze_imported,
    is_import,
    judged_trajectories,
    question_progress,
    stored_findings,
    to_analyze,
)
from traced.pipeline.analyze import analyze as analyze_stage
from traced.pipeline.collect import CONSTANT_CUSTOMER, not_analyzed
from traced.pipeline.collect import collect as collect_stage
from traced.pipeline.context import Context, RunningStage
from traced.pipeline.findings import (
    BUILTIN,
    EXPLAINED,
    MIXED_FAILURES,
    MIXED_TASKS,
    UNEXPLAINED,
    AnalysisContext,
    Comparison,
    Difference,
    explanation_text,
)
from traced.pipeline.findings import compare as compare_analysts
from traced.targets.conversation_target import conversation_target

ID = 16  # printed characters of a trajectory's id, at least
SOME = 3
MINED_KEY, LEFT_OUT = "mined", "left out"  # keys in the figures of a model
DROP_REASONS = "no existing message cited, name or text missing, or above the maximum number"
OTHER_PARTIES = {"simulator": "user", "infrastructure": "infrastructure", "task": "ambiguous task"}


@dataclass(frozen=True)
class AnalysisRecord:
    """Stored results of an analysis besides its findings.

    Attributes:
        descriptions: Of the capabilities.
        figures: Of a model.
        outcomes: Successes and failures that were analysed; zeros for an import.
        pairing: Whether the gaps are within tasks, in words; "" if that was not stored.
        unexplained: Failures that lack no capability; 0 if that was not stored.
        customers: What is wrong with the customers' names; "" if nothing is.
        explained: Which capabilities are not retained because others explain them, in words; "" for none.
    """

    descriptions: Mapping[str, str]
    citations: Sequence[Citation]
    faults: Sequence[FaultRecord]
    figures: Mapping[str, Any]
    outcomes: tuple[int, int] = (0, 0)
    pairing: str = ""
    unexplained: int = 0
    customers: str = ""
    explained: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return citations, faults, left-out trajectories and figures, without those that the analyst does not give."""
        citations = [
            {"capability": row.capability, "trajectory": row.trajectory_id, "message": row.message_index}
            | {name: text for name, text in (("reason", row.reason), ("policy", row.policy)) if text}
            for row in self.citations
        ]
        faults = [
            {"trajectory": row.trajectory_id, "fault": row.fault, "message": row.message_index, "reason": row.reason}
            for row in self.faults
        ]
        left_out = [{"trajectory": key, "reason": reason} for key, reason in self.figures.get(LEFT_OUT, {}).items()]
        parts: dict[str, list[Any]] = {"citations": citations, "faults": faults, "left_out": left_out}
        figures = {name: figure for name, figure in self.figures.items() if name != LEFT_OUT}
        values = {**parts, "figures": figures, "customers": self.customers}
        return {name: value for name, value in values.items() if value}


def stored_analysis(settings: Settings, cycle: str) -> AnalysisRecord:
    """Read the stored analysis of a cycle."""
    with store_reader(settings) as session:
        descriptions = {row.name: row.description for row in list_capabilities(session, cycle)}
        citations, faults = list_citations(session, cycle), list_faults(session, cycle)
        events = list_stage_events(session, cycle)
    details = [event.detail for event in events if event.stage == "analyze"]
    collections = [event.detail for event in events if event.stage == "collect" and event.detail]
    customers = collections[-1].get(CONSTANT_CUSTOMER, "") if collections else ""
    outcomes = next(((detail["successes"], detail["failures"]) for detail in details if "successes" in detail), (0, 0))
    figures = next((detail for detail in reversed(details) if MINED_KEY in detail), {})
    pairing = next((_pairing(detail) for detail in reversed(details) if MIXED_FAILURES in detail), "")
    unexplained = next((detail[UNEXPLAINED] for detail in reversed(details) if UNEXPLAINED in detail), 0)
    explanations: dict[str, list[str]] = next(
        (detail[EXPLAINED] for detail in reversed(details) if EXPLAINED in detail), {}
    )
    explained = explanation_text(explanations)
    return AnalysisRecord(
        descriptions, citations, faults, figures, outcomes, pairing, unexplained, customers, explained
    )


def show_analysis(cycle: str, analyst: str, findings: Sequence[Finding], record: AnalysisRecord) -> None:
    """Print an analyst's capabilities, text and evidence of the retained ones, and the faults of the failures."""
    _table(f"Capabilities of cycle {cycle}, by the {analyst} analyst", findings)
    retained = [finding.capability for finding in findings if finding.retained]
    _say(f"Lacking: {', '.join(retained) or 'no capability is retained'}")
    if record.explained:
        _say(record.explained[0].upper() + record.explained[1:])
    missing = missing_contrast(*record.outcomes, "conversations")
    if missing:
        _say(missing[0].upper() + missing[1:])
    elif not findings and analyst == BUILTIN:
        _say("The builtin analyst reads tool calls and found no pattern. --analyst llm reads the whole conversations.")
    for name in retained:
        places = [
            (citation.trajectory_id, citation.message_index)
            for citation in record.citations
            if citation.capability == name
        ]
        rests = (
            f" Evidence: {_some([f'message {index} of {_short_id(key)}' for key, index in places])}." if places else ""
        )
        _say(f"  {name}: {record.descriptions.get(name, '')}{rests}")
        reasons = [citation for citation in record.citations if citation.capability == name and citation.reason]
        for citation in reasons[:SOME]:
            policy = f' Policy: "{citation.policy}"' if citation.policy else ""
            _say(
                f"    {_short_id(citation.trajectory_id)}, message {citation.message_index}: {citation.reason}{policy}"
            )
    if record.customers:
        _say(f"{record.customers[:1].upper()}{record.customers[1:]}.")
    if findings and record.pairing:
        _say(record.pairing)
    if findings and record.unexplained:
        _say(_without_capability(record, analyst))
    _print_figures({**record.figures, "faults": Counter(citation.fault for citation in record.faults)})


def _without_capability(record: AnalysisRecord, analyst: str) -> str:
    """Say how many failures lack none of the capabilities."""
    hint = " --analyst llm reads the whole conversations." if analyst == BUILTIN else ""
    return f"{record.unexplained} of {record.outcomes[1]} failures lack none of these capabilities.{hint}"


def _pairing(detail: Mapping[str, Any]) -> str:
    """Say whether the gaps compare failures with successes of the same task; ``detail`` is that of the event."""
    tasks, mixed_failures, failures = detail[MIXED_TASKS], detail[MIXED_FAILURES], detail.get("failures", 0)
    share = f"{tasks} tasks have both successes and failures, with {mixed_failures} of {failures} failures"
    if detail[WITHIN_TASKS]:
        return f"The gaps compare failures with successes of the same task: {share}."
    return (
        f"The gaps compare different tasks, which is weaker evidence: {share}. Gaps within tasks need at least "
        f"{MIN_MIXED} such tasks with {MIN_SHARE * 100} % of the failures."
    )


def show_comparison(cycle: str, comparison: Comparison) -> None:
    """Print the capabilities of both analysts, then their differences."""
    for side in comparison.sides:
        _table(
            f"The {side.analyst} analyst on the {comparison.trajectories} trajectories of cycle {cycle}", side.findings
        )
        _print_figures(side.figures)
        console.print()
    for line in _where_they_differ(comparison):
        _say(line)


def _where_they_differ(comparison: Comparison) -> Iterator[str]:
    retained = {
        side.analyst: {finding.capability for finding in side.findings if finding.retained} for side in comparison.sides
    }
    shared = sorted(set.intersection(*retained.values()))
    yield f"Retained by both: {', '.join(shared) or 'none'}"
    for analyst, names in retained.items():
        yield f"Retained by {analyst} only: {', '.join(sorted(names - set(shared))) or 'none'}"
    for analyst, exclusive in comparison.only.items():
        yield f"Proposed by {analyst} only: {', '.join(exclusive) or 'none'}"
    for finding in comparison.differences:
        yield from _difference(finding)


def _difference(difference: Difference) -> Iterator[str]:
    first, second = difference.analysts
    lead_in = "; examples:" if difference.examples else ""
    yield (
        f"{difference.capability}: labelled differently in {difference.differ} of {difference.both} "
        f"trajectories{lead_in}"
    )
    for example in difference.examples:
        verdicts = f"{first}: {example[first].upper()}, {second}: {example[second].upper()}"
        yield f"  {_short_id(example['trajectory'])}: {verdicts}"


def _print_figures(figures: Mapping[str, Any]) -> None:
    """Print the faults of the failures, and what the model could not answer or what was dropped, if anything."""
    if faults := figures.get("faults"):
        _say(f"Failures: {_fault_summary(faults)}")
    if unsaid := figures.get("faults nobody said"):
        _say(f"  {unsaid} of these had no fault attribution and count as the agent's")
    if missing_side := figures.get("no contrast"):
        _say(f"No contrast is possible: {missing_side}.")
    if unusable := figures.get("unusable parts"):
        _say(f"The model gave no usable answer for {unusable} of {figures['parts']} parts of the sample.")
    if dropped := figures.get("named", 0) - figures.get("with evidence", 0):
        _say(f"{dropped} of {figures['named']} capabilities named by the model were dropped: {DROP_REASONS}.")
    if practices := figures.get("accepted practices"):
        _say("The labels accept what solved conversations did although the policy seems to say otherwise:")
        for row in practices:
            _say(f"  {row['practice']} ({_short_id(row['trajectory'])}, message {row['message']})")
    if omitted_count := figures.get("accepted practices not shown"):
        _say(f"The context of {figures['context']} tokens is too small: {omitted_count} of them were not shown.")
    if sample_agreement := figures.get("sample agreement"):
        _say(
            f"{figures['labelled again']} conversations were labelled more than once, with an agreement of "
            f"{_figure(sample_agreement)} (alpha)."
        )
    for name, omitted in figures.get("not shown", {}).items():
        _say(
            f"The context of {figures['context']} tokens is too small: {omitted['bytes']} bytes of {name} were not "
            f"shown, in {omitted['questions']} of the questions. Use a model with a longer context."
        )
    if omitted_characters := figures.get("capability characters not shown"):
        _say(
            f"The context of {figures['context']} tokens is too small: {omitted_characters} characters of the "
            "capabilities' texts were not shown."
        )
    if left_out := figures.get(LEFT_OUT):
        examples = f"{len(left_out)} trajectories could not be labelled ({_some([_short_id(key) for key in left_out])})"
        _say(f"Not analysed: {examples}. Reason for the first: {next(iter(left_out.values()))}")


def _fault_summary(faults: Mapping[str, int]) -> str:
    other_faults = ", ".join(f"{faults[party]} {owner}" for party, owner in OTHER_PARTIES.items() if faults.get(party))
    agent_faults = f"{faults.get('agent', 0)} caused by the agent"
    return f"{agent_faults}; excluded, caused by others: {other_faults}" if other_faults else f"{agent_faults} (all)"


def _short_id(key: str) -> str:
    """Return the beginning of an id: eight digits follow the name of its source, which all ids of a source share."""
    return key[: max(ID, key.rfind("-") + 9)]


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
    for finding in findings:
        gap = _bounded(finding.delta, finding.delta_low, finding.delta_high)
        coverage = _bounded(finding.coverage, finding.coverage_low, finding.coverage_high)
        alpha = "-" if finding.agreement is None else _figure(finding.agreement)
        runs = f"{finding.runs_agreeing}/{finding.runs}"
        table.add_row(finding.capability, gap, coverage, runs, alpha, "yes" if finding.retained else "no")
    console.print(table)


def _bounded(value: float | None, low: float | None, high: float | None) -> str:
    """Format a figure, with its interval on a second line if there is one."""
    if value is None:
        return "undefined"
    return _figure(value) + (f"\n[{_figure(low)}, {_figure(high)}]" if low is not None and high is not None else "")


def _figure(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # + 0.0 turns -0.0 into 0.0


def _say(line: str) -> None:
    console.print(harmless(line), highlight=False, markup=False)


ANALYSTS = (BUILTIN, "llm")
T = TypeVar("T")


def analyze(
    *,
    analyst: Annotated[
        str | None,
        typer.Option(
            "--analyst",
            metavar="|".join(ANALYSTS),
            help="Analyst: builtin (rules) or llm (language model).",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare",
            metavar=",".join(ANALYSTS),
            help="Compare these analysts, e.g. builtin,llm; nothing is stored.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    overrides: Overrides = None,
    model: Model = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Find the capabilities that the agent lacked in failed trajectories of the newest collection or import."""
    settings = read_settings(data_dir, overrides, model__spec=model, seed=seed, analysis__analyst=analyst)
    if compare is not None:
        if analyst is not None:
            raise typer.BadParameter("cannot be combined with --analyst", param_hint="--compare")
        cycle, comparison = _run_comparison(settings, _parse_analysts(compare))
        if as_json:
            print_json({"cycle": cycle, "comparison": comparison})
        else:
            show_comparison(cycle, comparison)
        return
    rest = 0
    if conversation_target(settings).is_recorded:
        cycle, findings, rest = _of_conversations(settings)
    else:
        cycle, findings = _imported(settings) or _collected(settings)
    record = stored_analysis(settings, cycle)
    if as_json:
        report = {"cycle": cycle, "analyst": settings.analysis.analyst, "capabilities": findings}
        print_json({**report, **record.as_json()})
        return
    show_analysis(cycle, settings.analysis.analyst, findings, record)
    if rest:
        _say(f"{rest} conversations with an outcome are not in this analysis; traced collect begins a new cycle")
    if conversation_target(settings).is_recorded and any(finding.retained for finding in findings):
        command = repeated("traced synthesize", data_dir, overrides, model=model, seed=seed, analysis__analyst=analyst)
        _say(f"Next: {command}")


def _parse_analysts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if sorted(names) != sorted(ANALYSTS):
        raise typer.BadParameter(f"{text!r} is not supported; write {','.join(ANALYSTS)}", param_hint="--compare")
    return names


def _newest_import(settings: Settings) -> Cycle | None:
    """Return the newest cycle if it is an import; None if episodes were collected since or nothing was imported."""
    with writing(settings) as session:
        latest_cycle = next(iter(list_cycles(session, limit=1)), None)
    return latest_cycle if latest_cycle is not None and is_import(latest_cycle) else None


def _imported(settings: Settings) -> tuple[str, list[Finding]] | None:
    """Analyse the newest import; return its cycle and findings, None without an import."""
    latest_import = _newest_import(settings)
    if latest_import is None:
        return None
    with opened_store(settings) as store:
        cycle, findings = _with_progress(
            lambda note: analyze_imported(store, settings, latest_import, datetime.now(UTC), note)
        )
    return cycle.id, findings


def _with_progress(work: Callable[[ProgressCallback], Awaitable[T]]) -> T:
    """Run ``work`` on an import with live progress, and return its result."""

    async def run() -> T:
        display.start("analyze", "Analyze successes against failures")
        answer = await work(question_progress(RunningStage(display, "analyze")))
        display.finish("analyze")
        return answer

    display = Progress(progress)
    with display.display():
        return asyncio.run(run())


def _collected(settings: Settings) -> tuple[str, list[Finding]]:
    async def work(context: Context) -> tuple[str, list[Finding]]:
        await analyze_stage(context)
        return context.cycle_id, stored_findings(context)

    return on_cycle(settings, work, finder=to_be_analyzed)


def _of_conversations(settings: Settings) -> tuple[str, list[Finding], int]:
    """Analyse the recorded conversations of the target, in its unfinished cycle or a new one.

    Returns:
        The cycle, its findings, and the number of conversations that the analysis could have used and has not.
    """

    async def work(context: Context) -> tuple[str, list[Finding], int]:
        await collect_stage(context)
        await analyze_stage(context)
        return context.cycle_id, stored_findings(context), not_analyzed(context)

    return on_cycle(settings, work, create=True)


def _run_comparison(settings: Settings, analysts: Sequence[str]) -> tuple[str, Comparison]:
    async def work(context: Context) -> tuple[str, Comparison]:
        stage = RunningStage(context.progress, "compare")
        context.progress.start(stage.key, "Compare analysts")
        comparison = await compare_analysts(
            analysis_context(context), to_analyze(context), analysts, question_progress(stage)
        )
        context.progress.finish(stage.key)
        return context.cycle_id, comparison

    latest_import = None if conversation_target(settings).is_recorded else _newest_import(settings)
    if latest_import is None:
        return on_cycle(settings, work, finder=collected_alike)
    with opened_store(settings) as store:
        context = AnalysisContext(settings, store, latest_import.id, latest_import.target)
        trajectories = judged_trajectories(store, latest_import)
        return latest_import.id, _with_progress(lambda note: compare_analysts(context, trajectories, analysts, note))
