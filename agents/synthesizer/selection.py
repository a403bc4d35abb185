"""Chooses which templates an environment holds and how often each kind comes up.

Invariants: templates are grouped into strata by what the recorded agent did; every stratum keeps templates in turn
until the space is used up, so that rare kinds survive. A stratum weighs as the square root of its size, and more where
the capability was seen lacking. Where looking before acting is what is learnt, neither acting nor refusing falls under
a third, and both come up equally often where the same is asked; a small share of *controls* does not need the
capability. So no one-sided shortcut pays.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agents.synthesizer.corpus import masked
from agents.synthesizer.runtime import likeness
from agents.synthesizer.scenario_extraction import Template, calls_of

CONTROL_SHARE = 0.12
_LEAST_CLASS = 1 / 3
_SAME = 0.9  # likeness of openings that ask for the same


@dataclass
class Stratum:
    """Templates of one kind (positions), and how often the kind comes up (relative)."""

    kind: str
    weight: float
    templates: list[int]


def kind_of(template: Template) -> str:
    """What the recorded agent did: its calls in order, errors marked; "answer" where it wrote nothing."""
    calls = [("!" if call["kind"] == "error" else "") + str(call["tool"]) for call in calls_of(template["steps"])]
    acts = any(call["kind"] == "write" for call in calls_of(template["steps"]))
    return ("control:" if template["control"] else "act:" if acts else "answer:") + " ".join(calls)


def in_turn(templates: Sequence[Template], rng: random.Random) -> Iterator[Template]:
    """Every template once, one of each kind before a second of any; shuffled within its kind."""
    groups: dict[str, list[Template]] = defaultdict(list)
    for template in templates:
        groups[kind_of(template)].append(template)
    for kind in sorted(groups):
        rng.shuffle(groups[kind])
    for turn in range(max(map(len, groups.values()), default=0)):
        yield from (groups[kind][turn] for kind in sorted(groups) if turn < len(groups[kind]))


def strata(templates: Sequence[Template], lacking: Sequence[str], *, balanced: bool) -> list[Stratum]:
    """One stratum for each kind; ``lacking`` are openings of failures that lacked the capability."""
    groups: dict[str, list[int]] = defaultdict(list)
    for position, template in enumerate(templates):
        groups[kind_of(template)].append(position)
    found = [Stratum(kind, math.sqrt(len(members)), members) for kind, members in sorted(groups.items())]
    needing = [row for row in found if not row.kind.startswith("control:")]
    whole = sum(row.weight for row in needing)
    for row, share in zip(needing, _lacking_shares(needing, templates, lacking), strict=True):
        row.weight = 0.4 * row.weight / whole + 0.6 * share
    if balanced:
        _raise([row for row in needing if row.kind.startswith("act:")], needing)
        _raise([row for row in needing if row.kind.startswith("answer:")], needing)
        _even(needing, templates)
    controls = [row for row in found if row not in needing]
    if controls:
        factor = CONTROL_SHARE / (1 - CONTROL_SHARE) * _total(needing) / _total(controls)
        for row in controls:
            row.weight *= factor
    return found


def _lacking_shares(rows: list[Stratum], templates: Sequence[Template], lacking: Sequence[str]) -> list[float]:
    """For each stratum, the share of lacking openings that are most like its own (ties are divided by size)."""
    words = [[_words(templates[i]["opening"][0]) for i in row.templates] for row in rows]
    counts = [0.0] * len(rows)
    for opening in lacking:
        wanted = _words(opening)
        close = [round(max(likeness(wanted, w) for w in group), 2) for group in words]
        nearest = [i for i, value in enumerate(close) if value >= max(close) - 0.05]
        whole = sum(len(rows[i].templates) for i in nearest)
        for i in nearest:
            counts[i] += len(rows[i].templates) / whole
    total = sum(counts)
    sizes = [math.sqrt(len(row.templates)) for row in rows]
    return [count / total if total else size / sum(sizes) for count, size in zip(counts, sizes, strict=True)]


def _raise(part: list[Stratum], rows: list[Stratum]) -> None:
    """Raise the weights of ``part`` to a third of the whole, where there is another part."""
    mine, whole = _total(part), _total(rows)
    if part and len(part) < len(rows) and mine < _LEAST_CLASS * whole:
        for row in part:
            row.weight *= _LEAST_CLASS / (1 - _LEAST_CLASS) * (whole - mine) / mine


def _even(rows: list[Stratum], templates: Sequence[Template]) -> None:
    """Make acting as heavy as refusing where the same is asked: the strata with openings like a refusal's."""
    openings = {row.kind: [_words(templates[i]["opening"][0]) for i in row.templates] for row in rows}
    for refusing in (row for row in rows if row.kind.startswith("answer:")):
        asked = openings[refusing.kind]
        acting = [row for row in rows if row.kind.startswith("act:") and _alike(openings[row.kind], asked)]
        if acting:
            half = (refusing.weight + _total(acting)) / 2
            factor = half / _total(acting)
            refusing.weight = half
            for row in acting:
                row.weight *= factor


def _alike(openings: list[set[str]], asked: list[set[str]]) -> bool:
    """Whether most openings ask for what the others ask for, in nearly the same words."""
    close = [max(likeness(words, other) for other in asked) >= _SAME for words in openings]
    return sum(close) > len(close) / 2


def _total(rows: list[Stratum]) -> float:
    return sum(row.weight for row in rows)


def _words(text: str) -> set[str]:
    return set(masked(text).replace(".", " ").replace(",", " ").split())
