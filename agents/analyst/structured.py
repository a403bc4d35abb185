"""Structured data reasoning: among the records that a tool answered with, was the one taken that the user described?

Needed when a write names a record that the user described by its attributes rather than named. Lacking when a sibling
fits the user's (last) words strictly better, or when a parameter that is filled from described records held none.
"""

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.values import leaves
from agents.analyst.view import View
from agents.transcript import Call


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation; of several writes by one tool on one object the last one counts."""
    last = {(call.name, _object(call)): call for call in corpus.writes(view)}
    verdicts = [(call.index, right) for call in last.values() if (right := _right(call, view, corpus)) is not None]
    for index, right in verdicts:
        if not right:
            return lacking(index)
    return present(verdicts[-1][0]) if verdicts else NOT_NEEDED


def _right(call: Call, view: View, corpus: Corpus) -> bool | None:
    """Whether the described records were chosen well; None where the call chose none."""
    rights = []
    for path, value in leaves(call.arguments or {}):
        if not isinstance(value, str):
            continue
        selection = view.described(value, call.index)
        if selection is not None:
            rights.append(selection.right)
        elif (call.name, path) in corpus.described and not view.among(value, call.index):
            rights.append(False)
    return all(rights) if rights else None


def _object(call: Call) -> str:
    return str(next(iter((call.arguments or {}).values()), ""))
