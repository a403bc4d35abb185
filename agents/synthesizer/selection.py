"""Orders the templates of an environment by kind, and weights the kinds.

Templates are grouped into strata by what the recorded agent did. Each kind contributes in turn until the space in the
file is used up, so rare kinds are kept. The weight of a stratum grows with the square root of its size, and with the
share of failures lacking the capability that resemble it. If reading before acting is trained, acting and refusing each
have at least a third of the weight. Requests that are both acted on and refused have two thirds or more together, and
in each of them acting and refusing weigh the same. A small share of controls does not need the capability. A policy
that always acts or always refuses therefore gets little reward. Templates that seeds hardly vary are strata of their
own with a small share, so that few seeds repeat a task.
"""

import math
import random
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from agents.synthesizer.corpus import masked_words
from agents.synthesizer.runtime import likeness
from agents.synthesizer.scenario_extraction import Template, calls_of
from agents.synthesizer.shared_openings import PAIR

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
    """Yield every template once, one of each kind before a second of any, shuffled within each kind.

    Both templates of a pair have the same place among the pairs of their kind.
    """
    groups: dict[str, list[Template]] = defaultdict(list)
    for template in templates:
        groups[kind_of(template)].append(template)
    places: dict[int, float] = defaultdict(rng.random)
    for kind in sorted(groups):
        rng.shuffle(groups[kind])
        if any(PAIR in template for template in groups[kind]):
            groups[kind].sort(key=lambda template: places[template[PAIR]] if PAIR in template else rng.random())
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


def _raise_share(members: list[Stratum], rows: list[Stratum], share: float = _MIN_CLASS_SHARE) -> None:
    """Raise the weights of ``members`` to this share of the total, if there are other strata."""
    part_total, total = _total(members), _total(rows)
    if members and len(members) < len(rows) and part_total < share * total:
        for row in members:
            row.weight *= share / (1 - share) * (total - part_total) / part_total


def _balance(rows: list[Stratum], templates: Sequence[Template]) -> None:
    """Give refusing, and acting in strata whose openings resemble a refusal's, equal weight and two thirds together.

    Refusing strata that resemble the same acting stratum are one request. Without other strata, both have half.
    """
    openings = {row.kind: [masked_words(templates[i]["opening"][0]) for i in row.templates] for row in rows}
    requests: list[tuple[list[Stratum], list[Stratum]]] = []
    for refusing in (row for row in rows if row.kind.startswith("answer:")):
        refusing_rows = [refusing]
        acting_rows = [
            row
            for row in rows
            if row.kind.startswith("act:") and _asks_alike(openings[row.kind], openings[refusing.kind])
        ]
        for request in [request for request in requests if any(row in request[1] for row in acting_rows)]:
            requests.remove(request)
            refusing_rows += request[0]
            acting_rows += [row for row in request[1] if row not in acting_rows]
        if acting_rows:
            requests.append((refusing_rows, acting_rows))
    for request in requests:
        half = (_total(request[0]) + _total(request[1])) / 2
        for members in request:
            factor = half / _total(members)
            for row in members:
                row.weight *= factor
    _raise_share([row for request in requests for members in request for row in members], rows, 2 * _MIN_CLASS_SHARE)


def _asks_alike(openings: list[set[str]], other_openings: list[set[str]]) -> bool:
    """Return whether most of ``openings`` ask for the same as one of ``other_openings``, in nearly the same words."""
    is_close = [max(likeness(words, other) for other in other_openings) >= _MIN_SIMILARITY for words in openings]
    return sum(is_close) > len(is_close) / 2


def _total(rows: list[Stratum]) -> float:
    return sum(row.weight for row in rows)
