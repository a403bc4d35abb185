"""Moving on: did the agent call a tool again with the same arguments although nothing had changed?

Needed when at least two calls were made. Lacking when a call repeats an earlier one with no write and no user message
in between.
"""

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.tools import ToolKind
from agents.analyst.view import View


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    calls = view.spoken.calls
    if len(calls) < 2:
        return NOT_NEEDED
    users = [said.index for said in view.spoken.user]
    last: dict[tuple[str, str], int] = {}
    changed = -1
    for call in calls:
        before = last.get((call.name, call.raw))
        if before is not None and before >= changed and not any(before < index < call.index for index in users):
            return lacking(call.index)
        last[call.name, call.raw] = call.index
        if corpus.kinds.get(call.name) is ToolKind.WRITE and call.succeeded:
            changed = call.index
    return present(calls[-1].index)
