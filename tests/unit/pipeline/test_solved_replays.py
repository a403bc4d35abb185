"""The replays of the attribution that become scenarios of an environment."""

from pathlib import Path

import pytest

from store.records import StageState
from store.repositories.evidence import INCUMBENT
from store.repositories.trajectories import save_trajectories
from store.types import Label, Outcome, Trajectory, Verdict
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import trajectory
from traced.pipeline.attribution import replay_model
from traced.pipeline.synthesize import solved_replays

LIVE = "date-reasoning@v1"
CAPABILITY = "policy-adherence"


def replay(player: str, task: str, outcome: Outcome = Outcome.SUCCESS, cycle: str = "c1") -> Trajectory:
    key = f"{player} {task} {cycle}"
    return trajectory(key, outcome, model=replay_model(player), task_id=task, cycle_id=cycle)


def label_of(row: Trajectory, verdict: Verdict = Verdict.LACKING) -> Label:
    return Label(row.id, CAPABILITY, 0, verdict)


@pytest.mark.parametrize("has_live", [True, False])
def test_each_failure_that_lacked_the_capability_gives_its_first_solved_replay(tmp_path: Path, has_live: bool) -> None:
    failures = [trajectory(f"f{task}", task_id=task, model=INCUMBENT) for task in ("1", "2", "3", "4", "5")]
    labels = [*map(label_of, failures[:4]), label_of(failures[4], Verdict.PRESENT)]
    replays = [
        replay("base", "1"),
        replay(LIVE, "1"),
        replay(INCUMBENT, "1", Outcome.FAILURE),
        replay("base", "2"),
        replay(INCUMBENT, "2"),
        replay("base", "3"),
        replay("base", "4", Outcome.FAILURE),
        # Did not lack the capability.
        replay("base", "5"),
    ]
    with context_with_chain(tmp_path, {}) as context:
        with context.write_session() as session:
            save_trajectories(session, replays)
        if has_live:
            composition = {"models": [LIVE], "router": "", "by_turn": False}
            context.event(INCUMBENT, StageState.FINISHED, composition=composition, live=[LIVE], promoted_at=None)
        rows = {row.task_id: row.model for row in solved_replays(context, CAPABILITY, failures, labels)}
    expected = {"1": replay_model(LIVE), "2": replay_model(INCUMBENT), "3": replay_model("base")}
    assert rows == (expected if has_live else {})
