"""A report as one JSON object.

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
from typing import Any

from sandbox.admission.report.advice import advice
from sandbox.admission.report.meanings import means
from sandbox.admission.report.measured import examples, figures
from sandbox.admission.report.verdict import unchecked, verdict, was_made
from store.text import in_unicode
from store.types import AdmissionReport, Check


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
