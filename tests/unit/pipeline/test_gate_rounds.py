"""The rounds of a gate: which tasks its comparison of regressions has."""

from pathlib import Path
from typing import Any, cast

import pytest

from store.types import Label, Outcome, Trajectory, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CAPABILITY, trajectory
from traced.evaluation.gate import GatePolicy
from traced.pipeline import gate
from traced.pipeline.episodes import Player

CANDIDATE = "c@v1"


def run(task: str, model: str, outcome: Outcome) -> Trajectory:
    return trajectory(f"{task} {model}", outcome, task_id=task, model=model, split="gate")


async def test_regression_tasks_follow_from_the_runs_of_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tasks in which only the candidate exercised the capability, the one that the base solved without stays."""
    base = [run("spoilt", "base", Outcome.SUCCESS), run("needed", "base", Outcome.FAILURE)]
    candidate = [run("spoilt", CANDIDATE, Outcome.FAILURE), run("needed", CANDIDATE, Outcome.SUCCESS)]

    async def play(*_: object) -> tuple[list[Trajectory], list[Trajectory]]:
        return base, candidate

    def label(trajectories: list[Trajectory], *_: object, **__: object) -> list[Label]:
        return [
            Label(t.id, CAPABILITY.name, 0, Verdict.PRESENT if t.model == CANDIDATE else Verdict.NA)
            for t in trajectories
        ]

    monkeypatch.setattr(gate._Rounds, "_run_sides", play)
    monkeypatch.setattr(gate, "label", label)
    monkeypatch.setattr(gate, "is_labelled_by_model", lambda *_: False)
    with context_with_chain(tmp_path, {}) as context:
        sides = gate.Sides((("c1", CAPABILITY.name),), "", Player("base"), Player(CANDIDATE))
        source = cast(Any, None)
        rounds = gate._Rounds(context, sides, GatePolicy(), source, cast(Any, context.target), source)
        pairs = await rounds.gather(1, ["target", "regression"])
    assert [p.task_id for p in pairs["target"]] == ["needed", "spoilt"]
    assert [(p.task_id, p.base, p.adapter) for p in pairs["regression"]] == [("spoilt", True, False)]
