"""Multi-step completion: of several requests, was each one done, answered or declined?

Needed when the user made two requests or more. A request for a write is served by an attempt of its tool on its object
(or of another write on an object that no other request is about); a question by a read of its object or an answer that
names it. A hand-over serves what came before it. A request that the user took back is not counted.
"""

from collections.abc import Sequence

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.intents import Request
from agents.analyst.language import RETRACTION, identifiers
from agents.analyst.refusals import refusals
from agents.analyst.values import leaves
from agents.analyst.view import View
from agents.transcript import Call


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    requests = corpus.intents.requests(view)
    if len(requests) < 2:
        return NOT_NEEDED
    left = [request for request in requests if not _served(request, requests, view, corpus)]
    standing = [request for request in left if not _taken_back(request, view)]
    if standing:
        return lacking(view.spoken.agent[-1].index if view.spoken.agent else standing[0].index)
    if len(requests) - len(left) < 2:
        return NOT_NEEDED
    return present(max((call.index for call in view.spoken.calls), default=requests[-1].index))


def _served(request: Request, requests: Sequence[Request], view: View, corpus: Corpus) -> bool:
    handed_over = any(call.index > request.index for call in corpus.handoffs(view))
    if handed_over or any(True for _ in refusals(view, request)):
        return True
    if request.tool is None:
        return any(_touches(call, request) for call in view.spoken.calls) or _answered(request, requests, view)
    others = [other for other in requests if other is not request]
    return any(_serves(call, request, others) for call in corpus.writes(view))


def _serves(call: Call, request: Request, others: Sequence[Request]) -> bool:
    if call.index < request.index:
        return False
    if call.name == request.tool:
        return not request.objects or _touches(call, request) or not _about_records(call, others)
    claimed = any(other.tool == call.name or other.objects & request.objects for other in others)
    return not claimed and _touches(call, request)


def _about_records(call: Call, others: Sequence[Request]) -> bool:
    """Whether the call is on the object of another request for the same tool."""
    return any(other.tool == call.name and _touches(call, other) for other in others)


def _touches(call: Call, request: Request) -> bool:
    return any(str(value) in request.objects for _, value in leaves(call.arguments or {}))


def _answered(request: Request, requests: Sequence[Request], view: View) -> bool:
    """Whether the agent named the object afterwards, or replied to a message that held no other request."""
    alone = not any(other.index == request.index for other in requests if other is not request)
    later = [said for said in view.spoken.agent if said.index > request.index]
    return any(alone or request.objects & identifiers(said.text) for said in later)


def _taken_back(request: Request, view: View) -> bool:
    return any(RETRACTION.search(said.text) for said in view.spoken.user if said.index > request.index)
