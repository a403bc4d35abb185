"""Keeping the conversation: was it handed to a person before anything had been tried?

Needed in every conversation with a write or a hand-over. Lacking when the agent handed over without having attempted a
write or declined anything. A hand-over that the user asked for is not counted.
"""

import re

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.language import REFUSAL
from agents.analyst.view import View

_WANTS_PERSON = re.compile(r"\b(human|real person|representative|supervisor|manager|someone else)\b", re.IGNORECASE)


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    handed, writes = corpus.handoffs(view), corpus.writes(view)
    if not handed:
        return present(writes[-1].index) if writes else NOT_NEEDED
    first = handed[0].index
    if any(_WANTS_PERSON.search(said.text) for said in view.spoken.user_before(first)):
        return NOT_NEEDED
    declined = any(REFUSAL.search(said.text) for said in view.spoken.agent if said.index < first)
    if declined or any(call.index < first for call in writes):
        return present(first)
    return lacking(first)
