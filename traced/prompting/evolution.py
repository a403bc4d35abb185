"""A prompt patch evolved with ``gepa`` (Agrawal et al. 2025, reflective mutation on a Pareto front) on episodes.

A step plays a patch on a few training seeds, has a better text proposed from what was said and the reward, plays that
on the same seeds, and where it did better, on the validation seeds; the patch with the best mean there is the answer.

Invariants: one seeded generator decides everything here, so the same episodes and the same proposals give the same
patch: who keeps those and is stopped goes on by beginning again. No step is begun that the budget of rollouts might not
hold; a seed that is played again counts again. An episode whose reward is not known never counts as 0: ``play`` raises.
How it fails: what ``play`` and ``propose`` raise comes out as it was, but for ``BudgetSpent``, which ends the evolution
with the best patch so far. Not covered: merging of patches, several texts at once (``gepa`` can do both).
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.errors import BudgetSpent
from store.types import Trajectory
from traced.prompting.asking import answering

PATCH = "patch"  # the only component of gepa's candidates
PERFECT = 1.0

Play = Callable[[str, list[int]], Awaitable[list[Trajectory]]]  # a patch on seeds -> an episode for each, in order
Propose = Callable[[str, list[Trajectory], int], Awaitable[str]]  # from a patch and its episodes; "": nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What an evolution is given; ``rollouts`` is the budget of episodes, validation's included."""

    training: Sequence[int]
    validation: Sequence[int]
    minibatch: int
    rollouts: int
    seed: int

    @property
    def step(self) -> int:
        """The episodes that one step takes at most."""
        return 2 * self.minibatch + len(self.validation)


@dataclass(frozen=True)
class Evolved:
    """The best patch by its mean reward on the validation seeds; ``first`` is what the evolution began with there."""

    text: str
    validation: float
    first: float
    kept: int  # patches that did better than the one they came from, on the seeds where both were played
    proposed: int
    rollouts: int
    stopped_by: str  # "rollouts", "perfect", or what was spent


async def evolve(begin: str, plan: Plan, play: Play, propose: Propose) -> Evolved:
    """The best patch that comes of ``begin`` within the plan."""

    async def answer(asked: "_Played | _Proposed") -> Any:
        if isinstance(asked, _Played):
            return await play(asked.patch, asked.seeds)
        try:
            return await propose(asked.patch, asked.episodes, asked.number)
        except BudgetSpent as spent:
            return spent

    return await answering(lambda ask: _evolve(begin, plan, ask), answer)


@dataclass(frozen=True)
class _Played:
    """Asked of the event loop: a patch's episodes."""

    patch: str
    seeds: list[int]


@dataclass(frozen=True)
class _Proposed:
    """Asked of the event loop: a better patch."""

    patch: str
    episodes: list[Trajectory]
    number: int


@dataclass
class _Adapter:
    """What ``gepa.core.adapter.GEPAAdapter`` asks for; its examples are seeds, its traces episodes."""

    ask: Callable[[_Played | _Proposed], Any]
    proposed: int = 0
    spent: str = ""

    def evaluate(self, batch: list[int], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        """The rewards of a patch on seeds."""
        from gepa.core.adapter import EvaluationBatch

        episodes: list[Trajectory] = self.ask(_Played(candidate[PATCH], list(batch)))
        ids, rewards = [one.id for one in episodes], [one.reward for one in episodes]
        return EvaluationBatch(ids, rewards, episodes if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The episodes; ``traced.prompting.reflection`` takes what may be shown from them."""
        return {PATCH: [{"episode": episode} for episode in eval_batch.trajectories]}

    def propose_new_texts(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        """A better patch, or none."""
        episodes = [record["episode"] for record in reflective_dataset[PATCH]]
        told = self.ask(_Proposed(candidate[PATCH], episodes, self.proposed))
        if isinstance(told, BudgetSpent):
            self.spent = told.message
            return {}
        self.proposed += 1
        return {PATCH: told} if told and told != candidate[PATCH] else {}


def _evolve(begin: str, plan: Plan, ask: Callable[[_Played | _Proposed], Any]) -> Evolved:
    """In gepa's thread."""
    from gepa.api import optimize

    adapter, reasons = _Adapter(ask), [""]
    played_by: Any = adapter

    def ends(gepa_state: Any) -> bool:
        if adapter.spent:
            reasons.append(adapter.spent)
        elif max(gepa_state.program_full_scores_val_set) >= PERFECT:
            reasons.append("perfect")
        elif gepa_state.total_num_evals + plan.step > plan.rollouts:
            reasons.append("rollouts")
        return bool(reasons[-1])

    found: Any = optimize(
        seed_candidate={PATCH: begin},
        trainset=list(plan.training),
        valset=list(plan.validation),
        adapter=played_by,
        reflection_minibatch_size=plan.minibatch,
        perfect_score=PERFECT,
        stop_callbacks=ends,
        logger=_Logger(),
        track_best_outputs=False,
        seed=plan.seed,
    )
    means = found.val_aggregate_scores
    return Evolved(
        text=found.candidates[found.best_idx][PATCH],
        validation=means[found.best_idx],
        first=means[0],
        kept=len(means) - 1,
        proposed=adapter.proposed,
        rollouts=found.total_metric_calls or 0,
        stopped_by=reasons[-1],
    )


class _Logger:
    """gepa's words, for whoever debugs."""

    def log(self, message: str) -> None:
        """One line."""
        log.debug(message)
