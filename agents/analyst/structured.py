"""Structured data reasoning: among the records that a tool answered with, was the one taken that the user described?

Needed when a write names a record that the user described by its attributes rather than named. Lacking when a sibling
fits the user's (last) words strictly better, or when a parameter that is filled from described records held none.
"""

from collections.abc import Iterator, Sequence

from agents.analyst.corpus import Corpus
from agents.analyst.finding import NOT_NEEDED, Finding, lacking, present
from agents.analyst.selection import Pick
from agents.analyst.tools import ToolKind
from agents.analyst.view import View
from agents.transcript import Call


def detect(view: View, corpus: Corpus) -> Finding:
    """Judge one conversation; of several writes by one tool on one object the last one counts."""
    last = {(call.name, _object(call)): (call, picks) for call, picks in _writes(view, corpus)}
    verdicts = [
        (call.index, right) for call, picks in last.values() if (right := _right(call, picks, corpus)) is not None
    ]
    for index, right in verdicts:
        if not right:
            return lacking(index)
    return present(verdicts[-1][0]) if verdicts else NOT_NEEDED


def _writes(view: View, corpus: Corpus) -> Iterator[tuple[Call, list[Pick]]]:
    for call, picks in zip(view.spoken.calls, view.picks, strict=True):
        if corpus.kinds.get(call.name) is ToolKind.WRITE:
            yield call, picks


def _right(call: Call, picks: Sequence[Pick], corpus: Corpus) -> bool | None:
    """Whether the described records were chosen well; None where the call chose none."""
    rights = [pick.right for pick in picks if pick.right is not None]
    rights += [False for pick in picks if not pick.observed and (call.name, pick.path) in corpus.described]
    return all(rights) if rights else None


def _object(call: Call) -> str:
    return str(next(iter((call.arguments or {}).values()), ""))
