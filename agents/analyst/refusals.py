"""Where the agent told the user that a request would not be served."""

import re
from collections.abc import Iterator

from agents.analyst.intents import Request
from agents.analyst.language import REFUSAL, identifiers, pairs, related, stems
from agents.analyst.view import View

_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def refusals(view: View, request: Request) -> Iterator[int]:
    """The messages with a sentence that refuses ``request``: it names the object, or the deed and no other object."""
    for said in view.spoken.agent:
        if said.index <= request.index:
            continue
        for sentence in _SENTENCE.split(said.text):
            if REFUSAL.search(sentence) and _concerns(sentence, request):
                yield said.index
                break


def _concerns(sentence: str, request: Request) -> bool:
    named = identifiers(sentence)
    if request.objects and named:
        return bool(named & request.objects)
    present = set(stems(sentence))
    pointed = any(related(cue, one) for one in present for cue in request.cues) or request.cues & pairs(sentence)
    return len(present & request.stems) >= 2 or bool(pointed)
