"""How an admission report reads: for an author, person or model, who mends the environment from it alone.

``means`` and ``advice`` are the words for one check, ``asked`` says before any is made what they ask; ``as_data``,
``in_words``, ``on_terminal`` and ``page.page`` (for itself: it takes a template engine, which the service does without)
are the four forms of a whole report. Nothing of it is stored: it is computed from the names and the evidence, so that
old reports read like new ones. What an environment wrote into the evidence is hostile and harmless in all four.
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
