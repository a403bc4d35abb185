"""Error recovery: after a tool's error, did the agent get through in the end?

Present when every tool that answered with an error later succeeded, or when the agent handed over after trying
something else first. Lacking when it gave up or only repeated the failing call.
"""

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.view import View
from agents.transcript import Call


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    failed = [call for call in view.spoken.calls if call.result is not None and call.result.error]
    if not failed:
        return NOT_NEEDED
    ends = [(call, _way_out(call, view, corpus)) for call in failed]
    unresolved = [call for call, way_out in ends if way_out is None]
    if unresolved:
        return lacking(min(unresolved[-1].index + 2, view.spoken.length - 1))
    return present(max(way_out.index for _, way_out in ends if way_out is not None))


def _way_out(failed: Call, view: View, corpus: Corpus) -> Call | None:
    """The later call that got through, or the hand-over that followed another attempt."""
    later = [call for call in view.spoken.calls if call.index > failed.index]
    for call in later:
        if call.name == failed.name and call.succeeded:
            return call
    different = [call for call in later if (call.name, call.raw) != (failed.name, failed.raw)]
    handed = corpus.handoffs(view)
    return next((hand for hand in handed if any(call.index < hand.index for call in different)), None)
