"""What to change where reading the source refused it: the lines, and what to write there instead."""

from collections.abc import Iterator

from sandbox.admission.report.measured import Evidence
from sandbox.admission.static import MODULES
from store.plain import line

QUOTED = 200
# How a refusal reads, and what to do about it; the first that fits counts.
MENDS = {
    "does not parse": "It must be valid Python of the sandbox's version.",
    "more than": "It must be smaller: generate records from the seed instead of listing them.",
    "imports": f"Only these modules may be imported: {', '.join(sorted(MODULES))}.",
    "reads the clock": "Write the task's date into the environment or draw it from the seed; never ask the clock.",
    "from nothing": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses SystemRandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses urandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses __": "Write it without reaching into Python's own objects.",
    "uses ": "Write it without running code from text or reaching for what Python keeps to itself.",
    "reaches ": "Use what an allowed module offers by its public name, and nothing that it holds itself.",
    "calls print": "Remove what prints: what an agent may see are messages.",
    "calls": "Write it without running code from text, reading files or asking the terminal.",
    "defines no class": "Define a class Environment at the top level, with reset, step, done, score and oracle.",
}


def source(evidence: Evidence) -> Iterator[str]:
    """Every refused line, then each remedy once."""
    listed = evidence.get("refused")
    refused = [line(one, QUOTED) for one in listed] if isinstance(listed, list) else []
    if refused:
        yield f"Change these lines: {'; '.join(refused)}."
    mends = (next((mend for sign, mend in MENDS.items() if sign in one), "") for one in refused)
    yield from (mend for mend in dict.fromkeys(mends) if mend)
