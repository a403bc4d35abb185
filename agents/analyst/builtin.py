"""The builtin analyst: names candidate capabilities and labels trajectories with no model.

Invariants: the labelling table is complete, each (trajectory, capability) exactly once; everything is a function of the
trajectories and the seed; ``Trajectory.parts``, ``task_id`` and rewards are never read (outcomes only as evidence for
what to mine). Run r mines its statistics from a seeded 80 % of the trajectories and labels all of them, so runs differ
where the evidence is thin. Fails with ``AgentsError`` on an unknown capability or a malformed trajectory. Not covered:
capabilities without a detector in the catalogue (the ``llm`` analyst finds those).
"""

import random
from collections import Counter
from collections.abc import Sequence

from agents.analyst.catalogue import CANDIDATES, DETECTORS
from agents.analyst.corpus import Corpus, mine
from agents.analyst.view import View, views
from agents.errors import AgentsError
from store.types import Capability, Label, Trajectory, Verdict

SAMPLE = 0.8
MAX_CANDIDATES = 10
_APPLIES_TO_FEW = 3


def discover(trajectories: Sequence[Trajectory], *, seed: int) -> list[Capability]:
    """The candidate capabilities, at most 10: those whose detector applies to at least three trajectories.

    Deterministic; ``seed`` is that of the labelling runs, and discovery mines what run 0 mines.
    """
    seen = _minable(trajectories)
    spoken = views(seen)
    corpus = _mine_sample(seen, spoken, run=0, seed=seed)
    applies = Counter(
        capability.name
        for capability in CANDIDATES
        for one in spoken
        if DETECTORS[capability.name](one, corpus).verdict is not Verdict.NA
    )
    found = [capability for capability in CANDIDATES if applies[capability.name] >= _APPLIES_TO_FEW]
    return found[:MAX_CANDIDATES]


def label(
    trajectories: Sequence[Trajectory], capabilities: Sequence[Capability], *, run: int, seed: int
) -> list[Label]:
    """One run's labels of all trajectories, infrastructure outcomes included as NA."""
    return label_runs(trajectories, capabilities, runs=[run], seed=seed)


def label_runs(
    trajectories: Sequence[Trajectory], capabilities: Sequence[Capability], *, runs: Sequence[int], seed: int
) -> list[Label]:
    """The labels of several runs; reads the trajectories once."""
    unknown = [capability.name for capability in capabilities if capability.name not in DETECTORS]
    if unknown:
        raise AgentsError(
            f"the builtin analyst has no detector for {unknown[0]!r}, only for {', '.join(DETECTORS)}; "
            "label it with the analyst that discovered it"
        )
    seen = _minable(trajectories)
    spoken = views(seen)
    labels = []
    for run in runs:
        corpus = _mine_sample(seen, spoken, run=run, seed=seed)
        labels += [_label(one, capability, corpus, run) for one in spoken for capability in capabilities]
        labels += [
            Label(trajectory.id, capability.name, run, Verdict.NA)
            for trajectory in trajectories
            if not trajectory.outcome.judged
            for capability in capabilities
        ]
    return labels


def _label(one: View, capability: Capability, corpus: Corpus, run: int) -> Label:
    finding = DETECTORS[capability.name](one, corpus)
    return Label(one.spoken.trajectory_id, capability.name, run, finding.verdict, finding.index)


def _minable(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [trajectory for trajectory in trajectories if trajectory.outcome.judged]


def _mine_sample(trajectories: Sequence[Trajectory], spoken: Sequence[View], *, run: int, seed: int) -> Corpus:
    rng = random.Random(f"analyst:{seed}:{run}")
    size = min(len(spoken), max(1, round(SAMPLE * len(spoken))))
    chosen = sorted(rng.sample(range(len(spoken)), size))
    return mine([spoken[place] for place in chosen], [trajectories[place].outcome for place in chosen])
