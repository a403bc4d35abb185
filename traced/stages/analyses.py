"""Two analysts on the same trajectories, side by side: what each finds, and where they differ.

Invariants: nothing is stored but a model's replies, so that an analysis by that model pays nothing for them again;
capabilities are the same when they have the same name, which the llm analyst sees to (a capability that it finds again
keeps the known name). Verdicts are those of most runs; without a majority NA. How it fails: as ``analysts``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from agents.analyst.llm.analyst import Analysis
from agents.analyst.llm.asking import Tell, all_of
from agents.synthesizer.builtin import majority
from store.records import Finding
from store.types import Trajectory, Verdict
from traced.stages.analysts import Surroundings, analysed
from traced.stages.findings import contrasted, widest_first

EXAMPLES = 5


@dataclass(frozen=True)
class Side:
    """What one analyst finds, widest gap first; ``spared`` are failures that it holds others at fault for."""

    analyst: str
    findings: list[Finding]
    spared: list[str]
    figures: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One capability that two analysts have: of so many trajectories that both labelled so many differ, some of them.

    ``examples`` holds the trajectory's id, and the verdict of each analyst.
    """

    capability: str
    analysts: tuple[str, str]
    both: int
    differ: int
    examples: list[dict[str, str]]


@dataclass(frozen=True)
class Comparison:
    """``only`` names by analyst the capabilities that no other one has."""

    trajectories: int
    sides: list[Side]
    only: dict[str, list[str]]
    differences: list[Difference]


async def compare(
    around: Surroundings, trajectories: Sequence[Trajectory], analysts: Sequence[str], tell: Tell
) -> Comparison:
    """The analysts of these names on the same trajectories, at the same time."""
    found = dict(
        zip(analysts, await all_of(analysed(around, trajectories, one, tell) for one in analysts), strict=True)
    )
    names = {one: {capability.name for capability in of.capabilities} for one, of in found.items()}
    others = {one: set().union(*(names[other] for other in names if other != one)) for one in names}
    return Comparison(
        len(trajectories),
        [_side(around, trajectories, one, of) for one, of in found.items()],
        {one: sorted(own - others[one]) for one, own in names.items()},
        [
            _difference(name, (one, other), found)
            for one, other in combinations(analysts, 2)
            for name in sorted(names[one] & names[other])
        ],
    )


def _side(around: Surroundings, trajectories: Sequence[Trajectory], analyst: str, found: Analysis) -> Side:
    mined = {one.id: one.outcome for one in trajectories if one.id not in found.not_mined}
    findings = contrasted(around.cycle_id, found.labels, mined, around.settings.analysis, around.settings.seed)
    return Side(analyst, widest_first(findings), sorted(found.spared), found.figures)


def _difference(name: str, analysts: tuple[str, str], found: Mapping[str, Analysis]) -> Difference:
    first, second = (majority(found[one].labels, name) for one in analysts)
    judged = first.keys() & second.keys()
    differing = sorted(key for key in judged if first[key] is not second[key])
    examples = [_example(key, analysts, (first[key], second[key])) for key in differing[:EXAMPLES]]
    return Difference(name, analysts, len(judged), len(differing), examples)


def _example(key: str, analysts: tuple[str, str], verdicts: tuple[Verdict, Verdict]) -> dict[str, str]:
    return {"trajectory": key} | {one: verdict.value for one, verdict in zip(analysts, verdicts, strict=True)}
