"""What to change where a nearly right play is paid in full: which slip, on which argument, and what grading lacks."""

from collections.abc import Iterator
from typing import Any

from sandbox.admission.report.measured import Evidence, shown
from sandbox.admission.slips import AMONG_OTHERS, ANOTHER, CUT_SHORT, IN_WORDS, LEFT_OUT, NOTHING
from store.plain import line

NAME = 40
MENDS = {  # the gravest first: what one of them makes plain of an argument need not be told again
    LEFT_OUT: "Success must need every wanted write: compare the whole final state with the wanted one, all of it",
    ANOTHER: "Grade that argument: compare what was written with the right value",
    NOTHING: "Compare whole values: an empty text is the beginning of, and stands in, every text",
    CUT_SHORT: "Compare whole lists: some of what was wanted is not enough",
    AMONG_OTHERS: "Compare whole values: whether the right one stands somewhere in what was given is not enough",
}


def slips(evidence: Evidence) -> Iterator[str]:
    """Each remedy once, with the arguments that it is for."""
    told = evidence.get("loose")
    left = [one for one in (told if isinstance(told, list) else []) if isinstance(one, dict)]
    for slip, mend in MENDS.items():
        found = [one for one in left if one.get("slip") == slip]
        if found:
            yield f"It is paid in full although {'; or '.join(map(_in_words, found))}. {mend}."
        graver = {_argument(one) for one in found}
        left = [one for one in left if _argument(one) not in graver]


def _in_words(one: dict[str, Any]) -> str:
    """What was done, and on how many seeds that was paid."""
    tool, argument = line(one.get("tool", ""), NAME), line(one.get("argument", ""), NAME)
    what = IN_WORDS[one["slip"]].format(tool=tool, argument=argument)
    return f"{what} (on {shown(one.get('paid'))} of {shown(one.get('seeds'))} seeds)"


def _argument(one: dict[str, Any]) -> tuple[object, object]:
    return str(one.get("tool")), str(one.get("argument"))
