"""Render an admission report in words, tables and data, for the person or model that repairs the environment.

``means`` and ``advice`` explain one check, ``requirements`` what each check asks. ``as_data``, ``as_text``,
``on_terminal`` and ``html.page`` render a whole report. ``html`` is imported separately, because it needs a template
engine, which the service does without. Everything is computed from names and evidence, so that old reports are
explained in the words of this version.
"""

from sandbox.admission.report.advice import advice
from sandbox.admission.report.model import (
    MEANS,
    Bound,
    Example,
    Panel,
    bounds,
    examples,
    means,
    panel,
    requirements,
    unchecked,
    verdict,
)
from sandbox.admission.report.text import as_data, as_text, on_terminal

__all__ = [
    "MEANS",
    "Bound",
    "Example",
    "Panel",
    "advice",
    "as_data",
    "as_text",
    "bounds",
    "examples",
    "means",
    "on_terminal",
    "panel",
    "requirements",
    "unchecked",
    "verdict",
]
