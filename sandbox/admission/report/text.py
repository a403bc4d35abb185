"""Render an admission report for a terminal, as plain text for a model that repairs the environment, and as JSON.

The JSON object:

    environment   the environment's hash
    admitted      true or false
    verdict       "admitted", "admitted as far as could be checked", "refused" or "not judged"
    seconds       duration of all checks together
    not_checked   [{check, why}]: checks and parts of checks that were not run
    checks        in the order of the report, each
        name, passed, made, seconds, means
        figures   [{name, value, needs, kept, means}]: in words; kept is null without a bound
        examples  [{seed, what, transcript: [{role, text}]}]: episodes on single seeds
        advice    sentences on what to change; empty if the check passed or was not run
        evidence  what was measured, as it was stored

Texts in ``evidence`` are the environment's own, harmless only in JSON; every other text is sanitized.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sandbox.admission.report.advice import advice
from sandbox.admission.report.model import (
    VERDICT_NOT_JUDGED,
    VERDICT_REFUSED,
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
from store.text import replace_surrogates, sanitize_block, sanitize_line
from store.types import AdmissionReport, Check

# Characters of one text of the evidence, and of one message of a transcript, in plain text.
PLAIN_DETAIL = 1_500
PLAIN_MESSAGE = 500
MAX_EXAMPLES = 2
# The last messages of a transcript, which show the outcome.
MAX_MESSAGES = 10
# Figures named of a check that miss their bounds.
MAX_MISSES = 8
SIGNS = {"✓": "green", "✗": "bold red", "·": "dim"}
COLOURS = {VERDICT_REFUSED: "bold red", VERDICT_NOT_JUDGED: "bold yellow"}
# Length of the summary beside a check.
SUMMARY_CHARACTERS = 90
NAME_CHARACTERS = 24
# Characters of one text and of one message on a terminal.
TERMINAL_DETAIL = 2_000
TERMINAL_MESSAGE = 600


def as_text(report: AdmissionReport) -> str:
    """Return the whole report as a few thousand characters of plain text."""
    failed = [check for check in report.checks if not check.passed and was_made(check)]
    passed = [sanitize_line(check.name) for check in report.checks if check.passed and was_made(check)]
    # Advice precedes observations, so that a reader who stops early misses only examples.
    parts = [f"Verdict: {verdict(report)}. Passed: {', '.join(passed) or 'nothing'}."]
    parts += _failures(failed)
    parts += [f"Not checked: {', '.join(names)} ({reason})." for reason, names in by_reason(report).items()]
    # A text that several checks saw stands once.
    headings: dict[str, str] = {}
    for check in failed:
        for heading, text in _observations(check):
            headings.setdefault(text, heading)
    observations = [f"{heading}{text}" for text, heading in headings.items()]
    return "\n\n".join([*parts, *(["What was seen:", *observations] if observations else [])])


def _failures(checks: Sequence[Check]) -> Iterator[str]:
    """Yield a paragraph for each failed check; one that failed as an earlier one did refers to it."""
    earlier: dict[tuple[str, ...], str] = {}
    for check in checks:
        changes = tuple(_changes(check))
        name = sanitize_line(check.name)
        body = "\n".join(changes) if changes not in earlier else f"- The same failure as in {earlier[changes]}."
        earlier.setdefault(changes, name)
        yield f"Failed: {name} ({means(check.name) or 'a check'})\n{body}".rstrip()


def _changes(check: Check) -> Iterator[str]:
    misses = [figure for figure in figures(check.evidence) if figure.kept is False]
    yield from (f"- {figure.name} is {figure.value}, needs {figure.needs}" for figure in misses[:MAX_MISSES])
    if len(misses) > MAX_MISSES:
        yield f"- {len(misses) - MAX_MISSES} further figures miss their bounds"
    yield from (f"- {sentence}" for sentence in advice(check))


def _observations(check: Check) -> Iterator[tuple[str, str]]:
    """Yield (heading, text) of what a check saw."""
    name = sanitize_line(check.name)
    for key, text in details(check.evidence):
        yield f"{name}, {key}:\n", sanitize_block(text, PLAIN_DETAIL)
    for sample in examples(check.evidence)[:MAX_EXAMPLES]:
        yield f"{name}, seed {sample.seed or 'unknown'}: ", "\n".join(_plain_example(sample))


def _plain_example(item: Example) -> Iterator[str]:
    yield sanitize_block(item.description, PLAIN_DETAIL)
    omitted = max(0, len(item.transcript) - MAX_MESSAGES)
    if omitted:
        yield f"  ({omitted} messages before these)"
    yield from (f"  {role}: {sanitize_block(text, PLAIN_MESSAGE)}" for role, text in item.transcript[omitted:])


def on_terminal(report: AdmissionReport, subject: str) -> Group:
    """Return the whole report on ``subject`` (such as a file's name) for a terminal."""
    parts: list[RenderableType] = [_table(report, subject)]
    for check in report.checks:
        if not check.passed and was_made(check):
            parts += [Text(), *_failed(check)]
    unchecked_by_reason = by_reason(report)
    if unchecked_by_reason:
        parts += [Text(), Text("Not checked", "bold")]
        parts += [
            Padding(Text(f"{', '.join(names)}: {reason}"), (0, 2), expand=False)
            for reason, names in unchecked_by_reason.items()
        ]
    parts += [Text(), Text(f"{sanitize_line(subject)}: {headline(report)}", COLOURS.get(verdict(report), "bold green"))]
    return Group(*parts)


def _table(report: AdmissionReport, subject: str) -> Table:
    table = Table(title=Text(f"Admission of {sanitize_line(subject)}"), title_justify="left")
    table.add_column("")
    table.add_column("check", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("measured")
    for check in report.checks:
        table.add_row(
            Text(mark(check), SIGNS[mark(check)]),
            Text(sanitize_line(check.name, NAME_CHARACTERS), "bold" if mark(check) == "✗" else ""),
            f"{check.seconds:.2f}",
            Text(_summary(check)),
        )
    return table


def _summary(check: Check) -> str:
    """Return the figures that miss their bounds, else the first advice of a failed check, else the measured figures.

    Of the measured figures, those with bounds come first.
    """
    policy_panel = panel(check.evidence)
    maxima = [replace(figure, name=f"greatest {figure.name}") for figure in policy_panel.maxima] if policy_panel else []
    all_figures = [*maxima, *single_figures(check.evidence)]
    misses = [f"{figure.name} {figure.value} (needs {figure.needs})" for figure in all_figures if figure.kept is False]
    kept_count = sum(figure.kept is True for figure in all_figures)
    policies = (
        [f"{len(policy_panel.out_of_bounds())} of {len(policy_panel.rows)} policies"]
        if policy_panel and policy_panel.out_of_bounds()
        else []
    )
    if misses:
        kept_text = f"{kept_count} others within bounds" if kept_count > 1 else "1 other within its bound"
        return _joined([*policies, *misses, *([kept_text] if kept_count else [])])
    if not check.passed and was_made(check):
        return _shortened(advice(check)[0])
    ranked = sorted(
        (figure for figure in all_figures if figure.value != "none"), key=lambda figure: figure.kept is None
    )
    return _joined([f"{figure.name} {figure.value}" for figure in ranked])


def _joined(entries: list[str]) -> str:
    """Join as many entries as fit into ``SUMMARY_CHARACTERS``, at least the first."""
    summary = ""
    for entry in entries:
        if summary and len(summary) + len(entry) > SUMMARY_CHARACTERS:
            return f"{summary} …"
        summary = f"{summary} · {entry}" if summary else entry
    return summary


def _shortened(sentence: str) -> str:
    return sentence if len(sentence) <= SUMMARY_CHARACTERS else f"{sentence[:SUMMARY_CHARACTERS].rstrip()}…"


def _failed(check: Check) -> Iterator[RenderableType]:
    yield Text.assemble(
        ("✗ ", "bold red"), (sanitize_line(check.name, NAME_CHARACTERS), "bold"), f"  {means(check.name)}"
    )
    policy_panel = panel(check.evidence)
    if policy_panel:
        yield Padding(_panel(policy_panel), (0, 2), expand=False)
    all_figures = single_figures(check.evidence)
    if all_figures:
        yield Padding(_figures(all_figures), (0, 2), expand=False)
    for name, text in details(check.evidence):
        yield Padding(Text(name, "dim"), (0, 2), expand=False)
        yield Padding(Text(_truncated(text, TERMINAL_DETAIL)), (0, 4), expand=False)
    for sample in examples(check.evidence):
        yield Padding(_terminal_example(sample), (0, 2), expand=False)
    yield Padding(Text("What to change", "bold"), (0, 2), expand=False)
    for sentence in advice(check):
        yield Padding(_bullet(sentence), (0, 2), expand=False)


def _figures(all_figures: list[Figure]) -> Table:
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_column(no_wrap=True)
    for figure in all_figures:
        cell = Text(figure.value, "red" if figure.kept is False else "")
        if figure.needs:
            cell.append(f"  needs {figure.needs}", "dim")
        if figure.means:
            cell.append(f"  {figure.means}", "dim italic")
        table.add_row(Text(figure.name, "dim"), cell)
    return table


def _panel(policy_panel: Panel) -> Group:
    """Return the policies that miss a bound, and the number of the others."""
    table = Table.grid(padding=(0, 2), pad_edge=False)
    table.add_row(
        Text("policy", "dim"), *(Text(f"{field} {needs}".rstrip(), "dim") for field, needs, _ in policy_panel.columns)
    )
    for name, row in policy_panel.out_of_bounds().items():
        table.add_row(name, *(Text(figure.value, "red" if figure.kept is False else "") for figure in row))
    return Group(table, *([Text(policy_panel.remaining_text(), "dim")] if policy_panel.remaining_text() else []))


def _terminal_example(item: Example) -> Group:
    parts: list[RenderableType] = [Text(f"Seed {item.seed}: {item.description}" if item.seed else item.description)]
    for role, text in item.transcript:
        parts.append(
            Padding(Text.assemble((f"{role}: ", "dim"), _truncated(text, TERMINAL_MESSAGE)), (0, 2), expand=False)
        )
    return Group(*parts)


def _bullet(sentence: str) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("→", "yellow"), Text(sentence))
    return table


def _truncated(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… (+{len(text) - limit:,} characters)"


def as_data(report: AdmissionReport) -> dict[str, object]:
    """Return the report as the JSON object that the module's docstring describes."""
    return {
        "environment": report.environment_hash,
        "admitted": report.admitted,
        "verdict": verdict(report),
        "seconds": round(sum(check.seconds for check in report.checks), 3),
        "not_checked": [vars(entry) for entry in unchecked(report)],
        "checks": [_check(check) for check in report.checks],
    }


def _check(check: Check) -> dict[str, object]:
    return {
        "name": replace_surrogates(check.name),
        "passed": check.passed,
        "made": was_made(check),
        "seconds": check.seconds,
        "means": means(check.name),
        "figures": [vars(figure) for figure in figures(check.evidence)],
        "examples": [
            {
                "seed": sample.seed,
                "what": sample.description,
                "transcript": [{"role": role, "text": text} for role, text in sample.transcript],
            }
            for sample in examples(check.evidence)
        ],
        "advice": advice(check) if was_made(check) else [],
        "evidence": _finite(replace_surrogates(check.evidence)),
    }


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    # JSON has no NaN and no infinities.
    return None if isinstance(value, float) and not math.isfinite(value) else value
