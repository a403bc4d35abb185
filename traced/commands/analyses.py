"""How analyses look on a terminal: one analyst's capabilities, or two analysts' side by side and where they differ.

A capability's name is never cut; ids of trajectories are, as everywhere on the terminal: ``--json`` has them whole.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sandbox.errors import harmless
from traced.commands.output import console

if TYPE_CHECKING:
    from store.records import Citation, FaultRecord, Finding
    from traced.config import Settings
    from traced.stages.analyses import Comparison, Difference

ID = 16  # characters of a trajectory's id
SOME = 3
MINED, LEFT_OUT = "mined", "left out"  # among a model's figures
WHY_DROPPED = "they cite no message that exists, lack a name or a text, or were too many"
OTHERS = {"simulator": "the user's", "infrastructure": "the infrastructure's", "task": "an ambiguous task's"}


@dataclass(frozen=True)
class Said:
    """What is stored of an analysis beside its findings; ``descriptions`` by capability, ``figures`` of a model."""

    descriptions: Mapping[str, str]
    citations: "Sequence[Citation]"
    faults: "Sequence[FaultRecord]"
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


def said(settings: "Settings", cycle: str) -> Said:
    """What the store holds of a cycle's analysis."""
    from store.repositories.analysis import list_capabilities
    from store.repositories.cycles import list_stage_events
    from store.repositories.thinking import list_citations, list_faults
    from traced.commands.stored import looking

    with looking(settings) as session:
        descriptions = {one.name: one.description for one in list_capabilities(session, cycle)}
        cited, faults = list_citations(session, cycle), list_faults(session, cycle)
        told = [one.detail for one in list_stage_events(session, cycle) if one.stage == "analyze"]
    return Said(descriptions, cited, faults, next((one for one in reversed(told) if MINED in one), {}))


def show_analysis(cycle: str, analyst: str, findings: "Sequence[Finding]", told: Said) -> None:
    """One analyst's capabilities, what the retained ones are and rest on, and whose fault the failures were."""
    _table(f"Capabilities of cycle {cycle}, by the {analyst} analyst", findings)
    kept = [finding.capability for finding in findings if finding.retained]
    _say(f"Lacking: {', '.join(kept) or 'nothing that the contrast keeps'}")
    for name in kept:
        places = [(one.trajectory_id, one.message_index) for one in told.citations if one.capability == name]
        rests = f" Seen in {_some([f'message {index} of {key[:ID]}' for key, index in places])}." if places else ""
        _say(f"  {name}: {told.descriptions.get(name, '')}{rests}")
    _tell_figures({**told.figures, "faults": Counter(one.fault for one in told.faults)})


def show_comparison(cycle: str, found: "Comparison") -> None:
    """Both analysts' capabilities, then where they differ."""
    for side in found.sides:
        _table(f"The {side.analyst} analyst on the {found.trajectories} trajectories of cycle {cycle}", side.findings)
        _tell_figures(side.figures)
        console.print()
    for line in _where_they_differ(found):
        _say(line)


def _where_they_differ(found: "Comparison") -> Iterator[str]:
    kept = {side.analyst: {one.capability for one in side.findings if one.retained} for side in found.sides}
    both = sorted(set.intersection(*kept.values()))
    yield f"Retained by both: {', '.join(both) or 'none'}"
    for analyst, names in kept.items():
        yield f"Retained by {analyst} only: {', '.join(sorted(names - set(both))) or 'none'}"
    for analyst, found_only in found.only.items():
        yield f"Found by {analyst} only: {', '.join(found_only) or 'none'}"
    for one in found.differences:
        yield from _difference(one)


def _difference(one: "Difference") -> Iterator[str]:
    first, second = one.analysts
    such = ", such as" if one.examples else ""
    yield f"{one.capability}: labelled differently in {one.differ} of {one.both} trajectories{such}"
    for each in one.examples:
        yield f"  {each['trajectory'][:ID]}: {first} says {each[first].upper()}, {second} {each[second].upper()}"


def _tell_figures(told: Mapping[str, Any]) -> None:
    """What a model could not do, and what became of it; nothing of what went as it should."""
    if faults := told.get("faults"):
        _say(f"Failures: {_blamed(faults)}")
    if unsaid := told.get("faults nobody said"):
        _say(f"  {unsaid} of these only because nobody said whose fault it was")
    if lacking := told.get("no contrast"):
        _say(f"Nothing to contrast: {lacking}.")
    if unusable := told.get("unusable parts"):
        _say(f"Of {told['parts']} parts of the sample {unusable} had no usable answer.")
    if dropped := told.get("named", 0) - told.get("with evidence", 0):
        _say(f"Of {told['named']} capabilities that the model named {dropped} were dropped: {WHY_DROPPED}.")
    if left_out := told.get(LEFT_OUT):
        which = f"{len(left_out)} that could not be labelled ({_some([key[:ID] for key in left_out])})"
        _say(f"Left out: {which}. About the first, {next(iter(left_out.values()))}")


def _blamed(faults: Mapping[str, int]) -> str:
    others = ", ".join(f"{faults[one]} {whose}" for one, whose in OTHERS.items() if faults.get(one))
    told = f"{faults.get('agent', 0)} the agent's fault"
    return f"{told}; not mined: {others}" if others else f"{told}, all of them"


def _some(told: Sequence[str]) -> str:
    return ", ".join(told[:SOME]) + (f" and {len(told) - SOME} more" if len(told) > SOME else "")


def _table(title: str, findings: "Sequence[Finding]") -> None:
    if not findings:
        _say(f"{title}: none")
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

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
