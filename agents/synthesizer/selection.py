"""Orders the templates of an environment by kind, and weights the kinds.

Templates are grouped into strata by what the recorded agent did. Each kind contributes in turn until the space in the
file is used up, so rare kinds are kept. The weight of a stratum grows with the square root of its size, and with the
share of failures lacking the capability that resemble it. If reading before acting is trained, acting and refusing each
have at least a third of the weight, and equal weight for the same request. A small share of controls does not need the
capability. A policy that always acts or always refuses therefore gets little reward. Templates that seeds hardly vary
are strata of their own with a small share, so that few seeds repeat a task.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from agents.synthesizer.corpus import masked_words
from agents.synthesizer.runtime import likeness
from agents.synthesizer.scenario_extraction import Template, calls_of

CONTROL_SHARE = 0.12
FIXED_SHARE = 0.05
_MIN_CLASS_SHARE = 1 / 3
# Similarity of the words of two openings that ask for the same.
_MIN_SIMILARITY = 0.9
_FIXED = " (fixed)"


@dataclass
class Stratum:
    """A kind of templates, given by their positions, and its relative weight."""

    kind: str
    weight: float
    templates: list[int]


def kind_of(template: Template) -> str:
    """Return what the recorded agent did: "control", "act" or "answer" (no write), then its calls, errors with "!"."""
    calls = [("!" if call["kind"] == "error" else "") + str(call["tool"]) for call in calls_of(template["steps"])]
    writes = any(call["kind"] == "write" for call in calls_of(template["steps"]))
    return ("control:" if template["control"] else "act:" if writes else "answer:") + " ".join(calls)


def in_turn(templates: Sequence[Template], rng: random.Random) -> Iterator[Template]:
    """Yield every template once, one of each kind before a second of any, shuffled within each kind."""
    groups: dict[str, list[Template]] = defaultdict(list)
    for template in templates:
        groups[kind_of(template)].append(template)
    for kind in sorted(groups):
        rng.shuffle(groups[kind])
    for turn in range(max(map(len, groups.values()), default=0)):
        yield from (groups[kind][turn] for kind in sorted(groups) if turn < len(groups[kind]))


def strata(
    templates: Sequence[Template],
    lacking_openings: Sequence[str],
    *,
    balanced: bool,
    fixed: Collection[int] = (),
) -> list[Stratum]:
    """Return one weighted stratum per kind.

    Args:
        lacking_openings: openings of failures that lacked the capability.
        balanced: give acting and refusing the weights that the module describes.
        fixed: positions of the templates that seeds hardly vary; together they have at most ``FIXED_SHARE`` of the
            weight if there are others, except where acting and refusing are balanced.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for position, template in enumerate(templates):
        groups[kind_of(template) + (_FIXED if position in fixed else "")].append(position)
    rows = [Stratum(kind, math.sqrt(len(members)), members) for kind, members in sorted(groups.items())]
    needing_rows = [row for row in rows if not row.kind.startswith("control:")]
    total_weight = sum(row.weight for row in needing_rows)
    for row, share in zip(needing_rows, _lacking_shares(needing_rows, templates, lacking_openings), strict=True):
        row.weight = 0.4 * row.weight / total_weight + 0.6 * share
    _bound_share([row for row in needing_rows if row.kind.endswith(_FIXED)], needing_rows)
    if balanced:
        _raise_share([row for row in needing_rows if row.kind.startswith("act:")], needing_rows)
        _raise_share([row for row in needing_rows if row.kind.startswith("answer:")], needing_rows)
        _balance(needing_rows, templates)
    controls = [row for row in rows if row not in needing_rows]
    if controls:
        _bound_share([row for row in controls if row.kind.endswith(_FIXED)], controls)
        factor = CONTROL_SHARE / (1 - CONTROL_SHARE) * _total(needing_rows) / _total(controls)
        for row in controls:
            row.weight *= factor
    return rows


def _bound_share(members: list[Stratum], rows: list[Stratum]) -> None:
    """Lower the weights of ``members`` to ``FIXED_SHARE`` of the total, if there are other strata."""
    part_total, total = _total(members), _total(rows)
    if members and len(members) < len(rows) and part_total > FIXED_SHARE * total:
        for row in members:
            row.weight *= FIXED_SHARE / (1 - FIXED_SHARE) * (total - part_total) / part_total


def _lacking_shares(rows: list[Stratum], templates: Sequence[Template], lacking_openings: Sequence[str]) -> list[float]:
    """Return for each stratum the share of lacking openings that its openings resemble (ties are divided by size).

    Without lacking openings, shares follow the square root of the size.
    """
    words = [[masked_words(templates[i]["opening"][0]) for i in row.templates] for row in rows]
    counts = [0.0] * len(rows)
    for opening_text in lacking_openings:
        opening_words = masked_words(opening_text)
        similarities = [round(max(likeness(opening_words, w) for w in group), 2) for group in words]
        nearest = [i for i, value in enumerate(similarities) if value >= max(similarities) - 0.05]
        total_size = sum(len(rows[i].templates) for i in nearest)
        for i in nearest:
            counts[i] += len(rows[i].templates) / total_size
    total = sum(counts)
    sizes = [math.sqrt(len(row.templates)) for row in rows]
    return [count / total if total else size / sum(sizes) for count, size in zip(counts, sizes, strict=True)]


def _raise_share(members: list[Stratum], rows: list[Stratum]) -> None:
    """Raise the weights of ``members`` to a third of the total, if there are other strata."""
    part_total, total = _total(members), _total(rows)
    if members and len(members) < len(rows) and part_total < _MIN_CLASS_SHARE * total:
        for row in members:
            row.weight *= _MIN_CLASS_SHARE / (1 - _MIN_CLASS_SHARE) * (total - part_total) / part_total


def _balance(rows: list[Stratum], templates: Sequence[Template]) -> None:
    """Give refusing, and acting in strata whose openings resemble a refusal's, equal weight."""
    openings = {row.kind: [masked_words(templates[i]["opening"][0]) for i in row.templates] for row in rows}
    for refusing in (row for row in rows if row.kind.startswith("answer:")):
        refusing_openings = openings[refusing.kind]
        acting_rows = [
            row for row in rows if row.kind.startswith("act:") and _asks_alike(openings[row.kind], refusing_openings)
        ]
        if acting_rows:
            half = (refusing.weight + _total(acting_rows)) / 2
            factor = half / _total(acting_rows)
            refusing.weight = half
            for row in acting_rows:
                row.weight *= factor


def _asks_alike(openings: list[set[str]], other_openings: list[set[str]]) -> bool:
    """Return whether most of ``openings`` ask for the same as one of ``other_openings``, in nearly the same words."""
    is_close = [max(likeness(words, other) for other in other_openings) >= _MIN_SIMILARITY for words in openings]
    return sum(is_close) > len(is_close) / 2


def _total(rows: list[Stratum]) -> float:
    return sum(row.weight for row in rows)
