"""Builders and renderers of admission reports for tests."""

from datetime import UTC, datetime
from io import StringIO
from typing import Any

from rich.console import Console

from sandbox.admission.report import advice, on_terminal
from store.types import AdmissionReport, Check

REPORT_TIME = datetime(2026, 3, 14, 9, 26, tzinfo=UTC)


def failed(name: str, **evidence: Any) -> Check:
    return Check(name, False, evidence, 0.5)


def advice_text(name: str, **evidence: Any) -> str:
    return " ".join(advice(failed(name, **evidence)))


def report_of(*checks: Check) -> AdmissionReport:
    return AdmissionReport("ab" * 32, all(check.passed for check in checks), list(checks))


def printed(report: AdmissionReport, subject: str = "lamp_shop.py") -> str:
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(on_terminal(report, subject))
    file = console.file
    assert isinstance(file, StringIO)
    return file.getvalue()
