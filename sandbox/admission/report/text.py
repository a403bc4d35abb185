"""A report for a terminal: a table of all checks, then what failed, why, and what to change.

Invariants: nothing is read as markup, and every text is harmless; what is to be changed comes last in each part, where
a terminal shows it.

A report as plain text, for a model that mends the environment: what failed, what to change, what was seen.

Invariants: every text is harmless; what to change comes before what was seen, check by check, so that a reader who
stops early has missed only examples; no duration of the checks stands in it. Not covered: what passed, but its names.

A report as one JSON object.

    environment   the environment's hash
    admitted      true or false
    verdict       "admitted", "admitted as far as could be checked", "refused" or "not judged"
    seconds       of all checks together
    not_checked   [{check, why}]: what the verdict does not rest on
    checks        in the order in which they were made, each
        name, passed, made, seconds, means
        figures   [{name, value, needs, kept, means}]: in words; kept is null where nothing bounds the figure
        examples  [{seed, what, transcript: [{role, text}]}]: what happened on single seeds
        advice    sentences: what to change; empty where the check passed
        evidence  what was measured, as it was stored

Invariants: it is valid JSON in valid Unicode, without NaN or infinities. Texts in ``evidence`` are the environment's
own and are harmless only as JSON writes them; every other text is harmless as it is.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sandbox.admission.report.advice import advice
from sandbox.admission.report.model import (
    NOT_JUDGED,
    REFUSED,
    Example,
    Figure,
    Panel,
    by_reason,
    details,
    examples,
    figures,
    headline,
    mark,
    means,
    panel,
    single_figures,
    unchecked,
    verdict,
    was_made,
)
from store.text import block, in_unicode, line
from store.types import AdmissionReport, Check

PLAIN_DETAIL = 1_500  # characters of a text of the evidence
PLAIN_MESSAGE = 500  # characters of a message of a transcript
EXAMPLES = 2
MESSAGES = 10  # of a transcript; where there are more, the last ones


def in_words(report: AdmissionReport) -> str:
    """The whole report, a few thousand characters."""
    failed = [check for check in report.checks if not check.passed and was_made(check)]
    passed = [line(check.name) for check in report.checks if check.passed and was_made(check)]
    parts = [f"Verdict: {verdict(report)}. Passed: {', '.join(passed) or 'nothing'}."]
    parts += ["\n".join(_to_change(check)) for check in failed]
    parts += [f"Not checked: {', '.join(names)} ({why})." for why, names in by_reason(report).items()]
    seen = [one for check in failed for one in _seen(check)]
    return "\n\n".join([*parts, *(["What was seen:", *seen] if seen else [])])


def _to_change(check: Check) -> Iterator[str]:
    yield f"Failed: {line(check.name)} ({means(check.name) or 'a check'})"
    yield from (
        f"- {one.name} is {one.value}, needs {one.needs}" for one in figures(check.evidence) if one.kept is False
    )
    yield from (f"- {sentence}" for sentence in advice(check))


def _seen(check: Check) -> Iterator[str]:
    for name, text in details(check.evidence):
        yield f"{line(check.name)}, {name}:\n{block(text, PLAIN_DETAIL)}"
    for one in examples(check.evidence)[:EXAMPLES]:
        yield "\n".join(_plain_example(line(check.name), one))


def _plain_example(check: str, one: Example) -> Iterator[str]:
    yield f"{check}, seed {one.seed or 'unknown'}: {block(one.what, PLAIN_DETAIL)}"
    left_out = max(0, len(one.transcript) - MESSAGES)
    if left_out:
        yield f"  ({left_out} messages before these)"
    yield from (f"  {role}: {block(text, PLAIN_MESSAGE)}" for role, text in one.transcript[left_out:])


SIGNS = {"✓": "green", "✗": "bold red", "·": "dim"}
COLOURS = {REFUSED: "bold red", NOT_JUDGED: "bold yellow"}
FIGURES = 90  # characters of what stands beside a check
NAME = 24
TERMINAL_DETAIL = 2_000  # characters of a text of the evidence
TERMINAL_MESSAGE = 600  # characters of a message of a transcript


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
        yield Padding(Text(_cut(text, TERMINAL_DETAIL)), (0, 4), expand=False)
    for one in examples(check.evidence):
        yield Padding(_terminal_example(one), (0, 2), expand=False)
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


def _terminal_example(one: Example) -> Group:
    parts: list[RenderableType] = [Text(f"Seed {one.seed}: {one.what}" if one.seed else one.what)]
    for role, text in one.transcript:
        parts.append(Padding(Text.assemble((f"{role}: ", "dim"), _cut(text, TERMINAL_MESSAGE)), (0, 2), expand=False))
    return Group(*parts)


def _pointed(sentence: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("→", "yellow"), Text(sentence))
    return table


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit:,} characters)"


def as_data(report: AdmissionReport) -> dict[str, Any]:
    """The object, ready for ``json.dumps``."""
    return {
        "environment": report.environment_hash,
        "admitted": report.admitted,
        "verdict": verdict(report),
        "seconds": round(sum(check.seconds for check in report.checks), 3),
        "not_checked": [vars(one) for one in unchecked(report)],
        "checks": [_check(check) for check in report.checks],
    }


def _check(check: Check) -> dict[str, Any]:
    return {
        "name": in_unicode(check.name),
        "passed": check.passed,
        "made": was_made(check),
        "seconds": check.seconds,
        "means": means(check.name),
        "figures": [vars(figure) for figure in figures(check.evidence)],
        "examples": [
            {
                "seed": one.seed,
                "what": one.what,
                "transcript": [{"role": role, "text": text} for role, text in one.transcript],
            }
            for one in examples(check.evidence)
        ],
        "advice": advice(check) if was_made(check) else [],
        "evidence": _finite(in_unicode(check.evidence)),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
