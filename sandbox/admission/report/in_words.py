"""A report as plain text, for a model that mends the environment: what failed, what to change, what was seen.

Invariants: every text is harmless; what to change comes before what was seen, check by check, so that a reader who
stops early has missed only examples; no duration of the checks stands in it. Not covered: what passed, but its names.
"""

from collections.abc import Iterator

from sandbox.admission.report.advice import advice
from sandbox.admission.report.meanings import means
from sandbox.admission.report.measured import Example, details, examples, figures
from sandbox.admission.report.verdict import by_reason, verdict, was_made
from store.plain import block, line
from store.types import AdmissionReport, Check

DETAIL = 1_500  # characters of a text of the evidence
SAID = 500  # characters of a message of a transcript
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
        yield f"{line(check.name)}, {name}:\n{block(text, DETAIL)}"
    for one in examples(check.evidence)[:EXAMPLES]:
        yield "\n".join(_example(line(check.name), one))


def _example(check: str, one: Example) -> Iterator[str]:
    yield f"{check}, seed {one.seed or 'unknown'}: {block(one.what, DETAIL)}"
    left_out = max(0, len(one.transcript) - MESSAGES)
    if left_out:
        yield f"  ({left_out} messages before these)"
    yield from (f"  {role}: {block(text, SAID)}" for role, text in one.transcript[left_out:])
