"""Tool-calling precision: every call fits its schema, and its arguments come from what was said and seen.

Needed whenever a tool was called with arguments. Lacking when a call breaks its schema, when a code appears that no
earlier text held, or when a choice was made that the user's words speak against. Dates are left to date reasoning,
choices among records to structured data reasoning, numbers and free text to nobody.
"""

from collections.abc import Sequence

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.language import last_mention, related, stem, words
from agents.analyst.schemas import fits_schema
from agents.analyst.tools import ToolKind
from agents.analyst.values import leaves
from agents.analyst.view import View
from agents.transcript import Call

_UNSAID = frozenset({"yes", "no", "true", "false", "none"})
_MARGIN = 0.5


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation."""
    calls = [
        call
        for call in view.spoken.calls
        if call.arguments != {} and corpus.kinds.get(call.name) not in (ToolKind.PURE, ToolKind.HANDOFF)
    ]
    for call in calls:
        if (
            not fits_schema(call, corpus.validators)
            or not _sourced(call, view, corpus)
            or not _chosen(call, view, corpus)
        ):
            return lacking(call.index)
    return present(calls[-1].index) if calls else NOT_NEEDED


def _sourced(call: Call, view: View, corpus: Corpus) -> bool:
    return all(
        view.grounded(value, call.index)
        for path, value in leaves(call.arguments or {})
        if (call.name, path) in corpus.copied and isinstance(value, str)
    )


def _chosen(call: Call, view: View, corpus: Corpus) -> bool:
    said = " \n ".join(one.text for one in view.spoken.user_before(call.index))
    for path, value in leaves(call.arguments or {}):
        choices = corpus.choices.get((call.name, path))
        if choices and value in choices and not _agrees(str(value), choices, said):
            return False
    return True


def _agrees(value: str, choices: Sequence[str], said: str) -> bool:
    """Whether the user's words point to no other choice more clearly than to ``value``."""
    if _UNSAID & set(choices):
        return True
    spoken = words(said)
    stemmed = [stem(word) for word in spoken]
    scores = {choice: _pointed(choice, said, spoken, stemmed) for choice in choices}
    return max(scores.values()) - scores[value] < _MARGIN


def _pointed(choice: str, said: str, spoken: Sequence[str], stemmed: Sequence[str]) -> float:
    """How clearly the words point to a choice: 1 said in so many words, 0.5 in part or by a related word, else 0."""
    if last_mention(said, choice) is not None:
        return 1.0
    parts = [stem(word) for word in words(choice)]
    if all(part in stemmed for part in parts):
        return 1.0
    if any(related(part, one) for part in parts for one in stemmed if len(one) > 3):
        return 0.5
    within = any(len(word) >= 4 and len(part) > len(word) and part.endswith(word) for part in parts for word in spoken)
    return 0.5 if within else 0.0
