"""How an admission report reads: for an author, person or model, who mends the environment from it alone.

``means`` and ``advice`` are the words for one check, ``asked`` says before any is made what they ask; ``as_data``,
``in_words``, ``on_terminal`` and ``page.page`` (for itself: it takes a template engine, which the service does without)
are the four forms of a whole report. Nothing of it is stored: it is computed from the names and the evidence, so that
old reports read like new ones. What an environment wrote into the evidence is hostile and harmless in all four.
"""

from sandbox.admission.report.advice import advice
from sandbox.admission.report.as_data import as_data
from sandbox.admission.report.asked import asked
from sandbox.admission.report.in_words import in_words
from sandbox.admission.report.meanings import MEANS, means
from sandbox.admission.report.measured import Bound, Example, Panel, bounds, examples, panel
from sandbox.admission.report.on_terminal import on_terminal
from sandbox.admission.report.verdict import unchecked, verdict

__all__ = [
    "MEANS",
    "Bound",
    "Example",
    "Panel",
    "advice",
    "as_data",
    "asked",
    "bounds",
    "examples",
    "in_words",
    "means",
    "on_terminal",
    "panel",
    "unchecked",
    "verdict",
]
