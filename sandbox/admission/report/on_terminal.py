"""A report for a terminal: a table of all checks, then what failed, why, and what to change.

Invariants: nothing is read as markup, and every text is harmless; what is to be changed comes last in each part, where
a terminal shows it.
"""

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sandbox.admission.report.advice import advice
from sandbox.admission.report.meanings import means
from sandbox.admission.report.measured import Example, Figure, Panel, details, examples, panel, single_figures
from sandbox.admission.report.verdict import NOT_JUDGED, REFUSED, by_reason, headline, mark, verdict, was_made
from store.plain import line
from store.types import AdmissionReport, Check

SIGNS = {"✓": "green", "✗": "bold red", "·": "dim"}
COLOURS = {REFUSED: "bold red", NOT_JUDGED: "bold yellow"}
FIGURES = 90  # characters of what stands beside a check
NAME = 24
DETAIL = 2_000  # characters of a text of the evidence
SAID = 600  # characters of a message of a transcript


def on_terminal(report: AdmissionReport, what: str) -> Group:
    """The whole report on ``what`` (say, a file's name)."""
    parts: list[RenderableType] = [_table(report, what)]
    for check in report.checks:
        if not check.passed and was_made(check):
            parts += [Text(), *_failed(check)]
    left = by_reason(report)
    if left:
        parts += [Text(), Text("Not checked", "bold")]
        parts += [Padding(Text(f"{', '.join(names)}: {why}"), (0, 2), expand=False) for why, names in left.items()]
    parts += [Text(), Text(f"{line(what)}: {headline(report)}", COLOURS.get(verdict(report), "bold green"))]
    return Group(*parts)


def _table(report: AdmissionReport, what: str) -> Table:
    table = Table(title=Text(f"Admission of {line(what)}"), title_justify="left")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("measured")
    for check in report.checks:
        table.add_row(
            Text(mark(check), SIGNS[mark(check)]),
            Text(line(check.name, NAME), "bold" if mark(check) == "✗" else ""),
            f"{check.seconds:.2f}",
            Text(_short(check)),
        )
    return table


def _short(check: Check) -> str:
    """What was missed and how much was not; where no figure was, why it failed, or the figures with bounds first."""
    of = panel(check.evidence)
    greatest = [replace(one, name=f"greatest {one.name}") for one in of.greatest] if of else []
    measured = [*greatest, *single_figures(check.evidence)]
    missed = [f"{one.name} {one.value} (needs {one.needs})" for one in measured if one.kept is False]
    kept = sum(one.kept is True for one in measured)
    policies = [f"{len(of.over())} of {len(of.rows)} policies"] if of and of.over() else []
    others = [f"{kept} others within bounds" if kept > 1 else "1 other within its bound"] if kept else []
    if missed:
        return _joined([*policies, *missed, *others])
    if not check.passed and was_made(check):
        return _cut_short(advice(check)[0])
    telling = sorted((one for one in measured if one.value != "none"), key=lambda one: one.kept is None)
    return _joined([f"{one.name} {one.value}" for one in telling])


def _joined(entries: list[str]) -> str:
    """As many as there is room for, the first in any case."""
    told = ""
    for entry in entries:
        if told and len(told) + len(entry) > FIGURES:
            return f"{told} …"
        told = f"{told} · {entry}" if told else entry
    return told


def _cut_short(sentence: str) -> str:
    return sentence if len(sentence) <= FIGURES else f"{sentence[:FIGURES].rstrip()}…"


def _failed(check: Check) -> Iterator[RenderableType]:
    yield Text.assemble(("✗ ", "bold red"), (line(check.name, NAME), "bold"), f"  {means(check.name)}")
    of = panel(check.evidence)
    if of:
        yield Padding(_panel(of), (0, 2), expand=False)
    measured = single_figures(check.evidence)
    if measured:
        yield Padding(_figures(measured), (0, 2), expand=False)
    for name, text in details(check.evidence):
        yield Padding(Text(name, "dim"), (0, 2), expand=False)
        yield Padding(Text(_cut(text, DETAIL)), (0, 4), expand=False)
    for one in examples(check.evidence):
        yield Padding(_example(one), (0, 2), expand=False)
    yield Padding(Text("What to change", "bold"), (0, 2), expand=False)
    for sentence in advice(check):
        yield Padding(_pointed(sentence), (0, 2), expand=False)


def _figures(measured: list[Figure]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    for figure in measured:
        told = Text(figure.value, "red" if figure.kept is False else "")
        if figure.needs:
            told.append(f"  needs {figure.needs}", "dim")
        if figure.means:
            told.append(f"  {figure.means}", "dim italic")
        table.add_row(Text(figure.name, "dim"), told)
    return table


def _panel(of: Panel) -> Group:
    """The policies that miss a bound, and how many there are besides."""
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_row(Text("policy", "dim"), *(Text(f"{field} {needs}".rstrip(), "dim") for field, needs, _ in of.columns))
    for name, row in of.over().items():
        table.add_row(name, *(Text(one.value, "red" if one.kept is False else "") for one in row))
    return Group(table, *([Text(of.others(), "dim")] if of.others() else []))


def _example(one: Example) -> Group:
    parts: list[RenderableType] = [Text(f"Seed {one.seed}: {one.what}" if one.seed else one.what)]
    for role, text in one.transcript:
        parts.append(Padding(Text.assemble((f"{role}: ", "dim"), _cut(text, SAID)), (0, 2), expand=False))
    return Group(*parts)


def _pointed(sentence: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("→", "yellow"), Text(sentence))
    return table


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit:,} characters)"
