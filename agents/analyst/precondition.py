"""Precondition verification: was the object read before it was changed (or the change refused)?

The preconditions are the links mined into the corpus. Not needed where no write with a precondition was attempted and
none was refused after reading; not covered: a write that goes against what the read said.
"""

from collections.abc import Sequence

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.intents import Request
from agents.analyst.preconditions import Link, satisfied
from agents.analyst.refusals import refusals
from agents.analyst.view import View


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    written = [(call, link) for call in view.spoken.calls for link in corpus.links if link.write == call.name]
    for call, link in written:
        if not satisfied(link, view.spoken.calls, call):
            return lacking(call.index)
    if written:
        return present(written[-1][0].index)
    requests = corpus.intents.requests(view)
    refused = [place for link in corpus.links if (place := _refused_after_reading(link, view, requests)) is not None]
    return present(min(refused)) if refused else NOT_NEEDED


def _refused_after_reading(link: Link, view: View, requests: Sequence[Request]) -> int | None:
    read = [call.index for call in view.spoken.calls if call.name == link.read and call.succeeded]
    if not read:
        return None
    wanted = [request for request in requests if request.tool == link.write]
    found = [place for request in wanted for place in refusals(view, request) if place > read[0]]
    return min(found, default=None)
