"""What the builtin analyst counted, as text: evidence for a model that names capabilities, and names that are known.

One run of its detectors over the mined trajectories, and the contrast of that run. Deterministic in the trajectories
and the seed; takes seconds, so it is called on a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.builtin import discover, label_runs
from agents.contrast import Contrast, contrast
from store.types import Capability, Trajectory


@dataclass(frozen=True)
class Hint:
    """A capability of the builtin catalogue and what its detector found."""

    capability: Capability
    found: Contrast


def hints(trajectories: Sequence[Trajectory], seed: int) -> list[Hint]:
    """Those that apply to some of the trajectories."""
    capabilities = discover(trajectories, seed=seed)
    labels = label_runs(trajectories, capabilities, runs=[0], seed=seed)
    told = {one.capability: one for one in contrast(labels, {one.id: one.outcome for one in trajectories})}
    return [Hint(capability, told[capability.name]) for capability in capabilities if capability.name in told]


def as_text(found: Sequence[Hint]) -> str:
    """A line for each; "" where there are none."""
    return "\n".join(map(_line, found))


def _line(hint: Hint) -> str:
    sides = (("failures", hint.found.failure), ("successes", hint.found.success))
    told = (f"of {side.total} {name} {side.needed} needed it and {side.lacking} lacked it" for name, side in sides)
    return f"- {hint.capability.name} ({hint.capability.description}): {'; '.join(told)}"
