"""What to change where the same seed gives other bytes, or where something outside the episode is touched."""

import ast
import re
from collections import Counter
from collections.abc import Iterator

from sandbox.admission.report.measured import Evidence, shown
from store.plain import line

QUOTED = 300
SCORED = "score() must only look: it may change nothing, draw nothing and count nothing."
OUTLIVES = (
    "Something outlives the episode: a module-level variable, a class attribute or a mutable default that is "
    "changed, a counter or cache, the clock, or the module random without a seed. Set everything on self anew in "
    "reset(), and draw everything from random.Random(seed)."
)
UNORDERED = (
    "The order of a set, hash(), id(), an object's default repr, the clock or unseeded chance reaches the "
    "episode. Sort sets before they are walked or drawn from, and draw everything from random.Random(seed)."
)
SHARED = (
    "Two Environment objects share state: a module-level variable or a class attribute. Keep everything on self "
    "and set it in reset()."
)
WHERE = {  # what the evidence's "where" holds, in words, and the usual causes; the first that fits counts
    "interleaved": ("played in turn with other episodes in one process", SHARED),
    "score asked": ("with its score asked for after every message", SCORED),
    "many other episodes": ("after many other episodes in the same process", OUTLIVES),
    "played before": ("on an instance that has played before", OUTLIVES),
    "process": ("played in a second process with another hash seed", UNORDERED),
    "again": ("played a second time in the same process", OUTLIVES),
}
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
TIME = re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d|\b\d\d:\d\d:\d\d|\b1[6-9]\d{8}(?:\.\d|\d{3})?")
WORD = re.compile(r"\w+")
FEW_WORDS, SAME = 3, 0.8


def determinism(evidence: Evidence) -> Iterator[str]:
    """On which seed and which way, where the bytes differ, and what the difference looks like."""
    where = str(evidence.get("where", ""))
    unknown = (f"played {line(where) or 'again'}", OUTLIVES)
    way, cause = next((told for sign, told in WHERE.items() if sign in where), unknown)
    difference = str(evidence.get("difference", ""))
    yield f"Seed {shown(evidence.get('seed'))}, {way}, gives other bytes: {line(difference, QUOTED)}"
    look = _looks_like(difference)
    if look:
        yield look
    yield cause


def _looks_like(difference: str) -> str:
    """What the two sides suggest, where they suggest anything."""
    if ADDRESS.search(difference):
        return "It shows an object's address in memory: never put an object's default repr or id() into a text."
    sides = _sides(difference)
    if sides is None:
        return ""
    one, other = sides
    if TIME.search(one) and TIME.search(other) and TIME.findall(one) != TIME.findall(other):
        return "It looks like a time of day: write the date into the environment or draw it from the seed."
    if _reordered(one, other):
        return "Much the same words stand there in another order: something without an order, such as a set, is walked."
    return ""


def _reordered(one: str, other: str) -> bool:
    """Whether what follows the common beginning holds much the same words; the last ones may be cut off."""
    common = next((at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its), 0)
    words = [Counter(WORD.findall(side[common:])) for side in (one, other)]
    longest = max(words[0].total(), words[1].total())
    return longest >= FEW_WORDS and (words[0] & words[1]).total() >= SAME * longest


def _sides(difference: str) -> tuple[str, str] | None:
    """The two texts that the evidence holds as ``'one' against 'other'``."""
    one, _, other = difference.partition(" against ")
    try:
        sides = ast.literal_eval(one), ast.literal_eval(other)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return (sides[0], sides[1]) if all(isinstance(side, str) for side in sides) else None


def effects(evidence: Evidence) -> Iterator[str]:
    """What was touched or printed."""
    events = evidence.get("events")
    if isinstance(events, list) and events:
        counted = Counter(line(one, 120) for one in events).most_common(5)
        listed = "; ".join(f"{event}, {times} times" if times > 1 else event for event, times in counted)
        yield (
            f"It reached outside its episode: {listed}. Keep all records in the source, and "
            "remove every use of files, sockets, processes, threads and the environment's variables."
        )
    if evidence.get("printed_characters"):
        head = f", beginning with {line(evidence['printed'], 120)}" if evidence.get("printed") else ""
        yield f"It printed {shown(evidence['printed_characters'])} characters{head}. Remove what prints."
