"""What a report comes down to: admitted, admitted as far as could be checked, or refused; and what was not checked."""

from collections.abc import Iterator
from dataclasses import dataclass

from sandbox.admission.report.meanings import MEANS
from store.plain import line
from store.types import AdmissionReport, Check

ADMITTED, AS_FAR, REFUSED = "admitted", "admitted as far as could be checked", "refused"
NOT_COMPARED = "not compared: "


@dataclass(frozen=True)
class Unchecked:
    """A check, or a part of one, that could not be made, and why."""

    check: str
    why: str


def verdict(report: AdmissionReport) -> str:
    """One of the three."""
    if not report.admitted:
        return REFUSED
    return AS_FAR if unchecked(report) else ADMITTED


def unchecked(report: AdmissionReport) -> list[Unchecked]:
    """What the verdict does not rest on, in the order of the checks."""
    return [*(one for check in report.checks for one in _left_out(check)), *_not_made(report)]


def _left_out(check: Check) -> Iterator[Unchecked]:
    if check.evidence.get("left_out"):
        yield Unchecked(line(check.name), line(check.evidence["left_out"]))
    for value in check.evidence.values():
        if isinstance(value, str) and value.startswith(NOT_COMPARED):
            yield Unchecked(line(check.name), line(value))


def _not_made(report: AdmissionReport) -> Iterator[Unchecked]:
    """Checks that a refusal came before; an older report that admits knew no more checks than it made."""
    made = {check.name for check in report.checks}
    failed = ", ".join(line(check.name) for check in report.checks if not check.passed)
    if failed:
        yield from (Unchecked(name, f"not made, because of: {failed}") for name in MEANS if name not in made)


def by_reason(report: AdmissionReport) -> dict[str, list[str]]:
    """The same, with all the checks that one reason kept from being made."""
    found: dict[str, list[str]] = {}
    for one in unchecked(report):
        found.setdefault(one.why, []).append(one.check)
    return found


def headline(report: AdmissionReport) -> str:
    """The verdict with its counts."""
    passed = sum(check.passed for check in report.checks)
    seconds = sum(check.seconds for check in report.checks)
    counts = f"{passed} of {len(report.checks)} checks passed in {seconds:.1f} s"
    return f"{verdict(report).capitalize()}: {counts}"


def failed_first(report: AdmissionReport) -> list[Check]:
    """The checks, those that failed before those that passed, else in the order of the admission."""
    return sorted(report.checks, key=lambda check: check.passed)
