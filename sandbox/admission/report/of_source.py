"""What to change where reading the source refused it: the lines, and what to write there instead."""

import re
from collections.abc import Iterator

from sandbox.admission.report.measured import Evidence
from sandbox.admission.static import MODULES
from store.plain import line

QUOTED = 200
MODULE = re.compile(r"imports (?:from )?(\w+)")
INSTEAD = {  # of modules that are asked for again and again
    "sqlite3": "sqlite3 opens files and loads extensions: keep the tables as lists, and read the questions that you "
    "grade with a small parser of your own",
    "numpy": "only the standard library is there: lists, math and statistics serve for records",
    "pandas": "only the standard library is there: lists of records, csv and itertools serve for tables",
    "pydantic": "only the standard library is there: use dataclasses and check arguments by hand",
    "time": "the task's time is a value of reset(): draw it from the seed",
    "uuid": "draw ids from random.Random(seed)",
    "secrets": "draw ids from random.Random(seed)",
    "pathlib": "keep files as texts in a dictionary, by path",
    "os": "nothing of the host is there: keep what the task needs in reset()",
    "sys": "nothing of the host is there: keep what the task needs in reset()",
    "logging": "what an agent may see are messages, and nobody else reads along",
}
# How a refusal reads, and what to do about it; the first that fits counts.
MENDS = {
    "does not parse": "It must be valid Python of the sandbox's version.",
    "more than": "It must be smaller: generate records from the seed instead of listing them.",
    "imports": f"Only these modules may be imported: {', '.join(sorted(MODULES))}.",
    "reads the clock": "Write the task's date into the environment or draw it from the seed; never ask the clock.",
    "from nothing": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses SystemRandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses urandom": "Make one random.Random(seed) in reset() and draw everything from it.",
    "uses random.": "Make one random.Random(seed) in reset() and draw everything from it, not from the module.",
    "uses io.": "Of io only StringIO and BytesIO are let through: keep texts in memory.",
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
    named = (MODULE.search(one) for one in refused)
    modules = dict.fromkeys(found[1] for found in named if found and found[1] in INSTEAD)
    yield from (f"Instead of {name}: {INSTEAD[name]}." for name in modules)
    mends = (next((mend for sign, mend in MENDS.items() if sign in one), "") for one in refused)
    yield from (mend for mend in dict.fromkeys(mends) if mend)
