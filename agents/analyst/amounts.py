"""Supported amounts: do the numbers in a write come from what was said, observed or computed with a tool?

Needed when a write carries a number above 10 (smaller ones are counts that people round in their heads). Lacking when
such a number had appeared in no earlier user message, observation or prompt.
"""

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.values import leaves
from agents.analyst.view import View

_COUNT = 10


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    given = [
        (call.index, value)
        for call in corpus.writes(view)
        for _, value in leaves(call.arguments or {})
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) > _COUNT
    ]
    for index, value in given:
        whole = int(value) if float(value).is_integer() else value
        if not view.grounded(whole, index):
            return lacking(index)
    return present(given[-1][0]) if given else NOT_NEEDED
