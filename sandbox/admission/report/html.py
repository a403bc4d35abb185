"""Render an admission report as one self-contained HTML page without scripts or outside resources.

Invariants: every text is escaped and sanitized; the page's own policy forbids scripts and outside resources.
"""

from datetime import datetime

from jinja2 import Environment, PackageLoader, StrictUndefined

from sandbox.admission.report.advice import advice
from sandbox.admission.report.model import (
    VERDICT_NOT_JUDGED,
    VERDICT_REFUSED,
    by_reason,
    details,
    examples,
    failed_first,
    headline,
    mark,
    means,
    panel,
    single_figures,
    verdict,
    was_made,
)
from store.text import sanitize_line
from store.types import AdmissionReport

VERDICTS = {VERDICT_REFUSED: "fail", VERDICT_NOT_JUDGED: "left"}
# CSS classes of the checks by mark.
KINDS = {"✓": "pass", "✗": "fail", "·": "left"}


def page(report: AdmissionReport, subject: str, at: datetime) -> str:
    """Return the page on ``subject`` (such as a file's name), made at ``at``."""
    environment = Environment(
        loader=PackageLoader("sandbox.admission.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    checks = [
        {
            "name": sanitize_line(check.name, 60),
            "mark": mark(check),
            "kind": KINDS[mark(check)],
            "seconds": check.seconds,
            "means": means(check.name),
            "panel": panel(check.evidence),
            "figures": single_figures(check.evidence),
            "details": details(check.evidence),
            "examples": examples(check.evidence),
            "advice": advice(check) if was_made(check) else [],
        }
        for check in failed_first(report)
    ]
    return environment.get_template("page.html").render(
        subject=sanitize_line(subject),
        hash=sanitize_line(report.environment_hash),
        at=at,
        verdict=verdict(report),
        headline=headline(report),
        kind=VERDICTS.get(verdict(report), "pass"),
        checks=checks,
        unchecked=by_reason(report),
    )
