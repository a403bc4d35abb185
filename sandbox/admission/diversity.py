"""Whether seeds make different tasks, or one task in many numbers or many words.

What has to be done on a seed, apart from how it is put: two wordings of one errand are one way.

A way is the order of the oracle's calls with the structure of their arguments and of the answers (which keys, of what
kind, how many items) and what is chosen or made for an argument: truth values, small numbers, and texts without the
words and numbers that the user or an answer has said before. What is copied from these, and whatever is said in words,
is no part of it. Pure; its cost is bounded (``CHOICES``, ``structure``).
Not covered: choices that only greater numbers tell apart; a text that the oracle words by chance counts as a choice.
"""

import re
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from sandbox.admission.context import Bench, Verdict, example
from sandbox.admission.fingerprint import actions, digest, exact, parsed, shape, structure
from sandbox.admission.hidden_information import leaves
from sandbox.wire import OraclePlay

CHOICES = 200  # looked at in one episode
LONG = 400  # characters of a text that are looked at
SMALL = 10
_PART = re.compile(r"\w+|[^\w\s]")


def way(play: OraclePlay) -> str:
    """A digest of what the oracle does and what it meets."""
    read = {part for message in play.task.messages for part in _parts(str(message.get("content") or ""))}
    left = CHOICES
    told: list[Any] = []
    for turn in play.turns:
        for call in turn.message.get("tool_calls") or []:
            arguments = parsed(call["function"]["arguments"])
            values = [value for _, value in sorted(leaves(arguments), key=itemgetter(0))][:left]
            left -= len(values)
            told.append([call["function"]["name"], structure(arguments), [_made(value, read) for value in values]])
        told.append([(reply["role"], structure(parsed(str(reply["content"])))) for reply in turn.replies])
        read.update(part for reply in turn.replies for part in _parts(str(reply["content"])))
    return digest(told)


def _parts(text: str) -> Iterator[str]:
    """Words, numbers and marks."""
    return (found[0] for found in _PART.finditer(text.casefold()))


def _made(value: Any, read: set[str]) -> Any:
    """What an agent adds to what it has read; "#" for numbers and for what it copies."""
    match value:
        case bool() | None:
            return value
        case int() if abs(value) < SMALL and str(abs(value)) not in read:
            return value
        case str():
            parts = [
                "#" if (part in read and part[0].isalnum()) or _counts(part) else part for part in _parts(value[:LONG])
            ]
            return [part for at, part in enumerate(parts) if part != "#" or parts[at - 1 : at] != ["#"]]
    return "#"


def _counts(part: str) -> bool:
    return any(letter.isdigit() for letter in part)


async def diversity(bench: Bench) -> Verdict:
    """Different seeds differ in more than names, ids and numbers, and in what has to be done beside the wording."""
    limits = bench.thresholds
    plays = await bench.oracle_plays(limits.diversity_seeds)
    shapes, ways = [shape(one) for one in plays], [way(one) for one in plays]
    distinct = len({exact(one) for one in plays}) / len(plays)
    (most, held_by), (usual, taken_by) = (Counter(found).most_common(1)[0] for found in (shapes, ways))
    evidence = {
        "seeds": len(plays),
        "distinct": round(distinct, 3),
        "distinct_required": limits.distinct,
        "shapes": len(set(shapes)),
        "shape_fraction": round(len(set(shapes)) / len(plays), 3),
        "shapes_required": limits.distinct_shapes,
        "commonest_shape": round(held_by / len(plays), 3),
        "commonest_allowed": limits.commonest_shape,
        "ways": len(set(ways)),
        "ways_required": limits.distinct_ways,
        "usual_way": round(taken_by / len(plays), 3),
        "usual_allowed": limits.usual_way,
        "action_sequences": len({actions(one) for one in plays}),
    }
    varied = distinct >= limits.distinct and len(set(shapes)) >= limits.distinct_shapes
    varied = varied and held_by / len(plays) <= limits.commonest_shape
    if varied and len(set(ways)) >= limits.distinct_ways and taken_by / len(plays) <= limits.usual_way:
        return True, evidence
    what = f"one of the {held_by} of {len(plays)} seeds that are alike once names, ids and numbers are masked"
    alike = [at for at, one in enumerate(shapes) if one == most]
    if varied:
        what = f"one of the {taken_by} of {len(plays)} seeds on which the same has to be done"
        alike = [at for at, one in enumerate(ways) if one == usual]
    seeds = bench.panel(len(plays))
    examples = [example(seeds[at], what, plays[at].task, bench.chat(plays[at])) for at in alike[:2]]
    return False, {**evidence, "examples": examples}
