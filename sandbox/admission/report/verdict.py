"""What a report comes down to: admitted, as far as could be checked or wholly, refused or not judged; and what is open.

Not judged is what no check could be made of: it is not admitted, and nothing was found against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.admission.report.meanings import MEANS
from store.plain import line
from store.types import AdmissionReport, Check

ADMITTED, AS_FAR, REFUSED = "admitted", "admitted as far as could be checked", "refused"
NOT_JUDGED = "not judged"
WHY = 600  # characters of a reason
NOT_COMPARED = "not compared: "


@dataclass(frozen=True)
class Unchecked:
    """A check, or a part of one, that could not be made, and why."""

    check: str
    why: str


def verdict(report: AdmissionReport) -> str:
    """One of the four."""
    if not report.admitted:
        return REFUSED if any(map(was_made, report.checks)) else NOT_JUDGED
    return AS_FAR if unchecked(report) else ADMITTED


def unchecked(report: AdmissionReport) -> list[Unchecked]:
    """What the verdict does not rest on, in the order of the checks."""
    return [*(one for check in report.checks for one in _left_out(check)), *_not_made(report)]


def was_made(check: Check) -> bool:
    """Whether the check was made at all, and not left out for what it would have needed."""
    return not check.evidence.get("left_out")


def mark(check: Check) -> str:
    """The sign before a check's name."""
    if not was_made(check):
        return "·"
    return "✓" if check.passed else "✗"


def _left_out(check: Check) -> Iterator[Unchecked]:
    if not was_made(check):
        yield Unchecked(line(check.name), line(check.evidence["left_out"], WHY))
    for value in check.evidence.values():
        if isinstance(value, str) and value.startswith(NOT_COMPARED):
            yield Unchecked(line(check.name), line(value, WHY))


def _not_made(report: AdmissionReport) -> Iterator[Unchecked]:
    """Checks that a refusal came before: those after the last one made. An older report knew fewer of the others."""
    known = list(MEANS)
    last = max((known.index(check.name) for check in report.checks if check.name in MEANS), default=-1)
    failed = ", ".join(line(check.name) for check in report.checks if was_made(check) and not check.passed)
    if failed:
        yield from (Unchecked(name, f"not made, because of: {failed}") for name in known[last + 1 :])


def by_reason(report: AdmissionReport) -> dict[str, list[str]]:
    """The same, with all the checks that one reason kept from being made."""
    found: dict[str, list[str]] = {}
    for one in unchecked(report):
        found.setdefault(one.why, []).append(one.check)
    return found


def headline(report: AdmissionReport) -> str:
    """The verdict with its counts."""
    made = [check for check in report.checks if was_made(check)]
    if verdict(report) == NOT_JUDGED:
        return f"Not judged: none of {len(report.checks)} checks could be made"
    passed = sum(check.passed for check in made)
    seconds = sum(check.seconds for check in report.checks)
    left = len(report.checks) - len(made)
    counts = f"{passed} of {len(made)} checks passed{f', {left} not made,' if left else ''} in {seconds:.1f} s"
    return f"{verdict(report).capitalize()}: {counts}"


def failed_first(report: AdmissionReport) -> list[Check]:
    """Those that failed, those that passed, those that were not made; among these in the order of the admission."""
    return sorted(report.checks, key=lambda check: (not was_made(check), check.passed))
