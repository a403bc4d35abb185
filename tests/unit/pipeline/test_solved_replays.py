"""The replays of the attribution that become scenarios of an environment."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agents.errors import SynthesisError
from store.records import StageState
from store.repositories.cycles import save_cycle
from store.repositories.evidence import INCUMBENT
from store.repositories.trajectories import save_trajectories
from store.types import Capability, Label, Outcome, Trajectory, Verdict
from tests.unit.agents.analysis.library import talk
from tests.unit.agents.analysis.test_states import conversation, successes
from tests.unit.pipeline.contexts import context_with_chain
from tests.unit.store.chain import CYCLE, trajectory
from traced.core.errors import CapabilityError
from traced.pipeline import synthesize
from traced.pipeline.attribution import replay_model
from traced.pipeline.context import Context
from traced.pipeline.synthesize import labels_of_replays, solved_replays

LIVE = "date-reasoning@v1"
CAPABILITY = "policy-adherence"


def replay(player: str, task: str, outcome: Outcome = Outcome.SUCCESS, cycle: str = "c1") -> Trajectory:
    key = f"{player} {task} {cycle}"
    return trajectory(key, outcome, model=replay_model(player), task_id=task, cycle_id=cycle, trial=int(cycle[1:]))


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
        replay(INCUMBENT, "3", cycle="c0"),
    ]
    with context_with_chain(tmp_path, {}) as context:
        with context.write_session() as session:
            save_cycle(session, replace(CYCLE, id="c0"))
            save_trajectories(session, replays)
        if has_live:
            composition = {"models": [LIVE], "router": "", "by_turn": False}
            context.event(INCUMBENT, StageState.FINISHED, composition=composition, live=[LIVE], promoted_at=None)
        rows = {row.task_id: row.model for row in solved_replays(context, CAPABILITY, failures, labels)}
    expected = {"1": replay_model(LIVE), "2": replay_model(INCUMBENT), "3": replay_model("base")}
    assert rows == (expected if has_live else {})


def test_a_replay_is_an_example_only_if_the_analyst_says_so() -> None:
    replays = [
        talk(conversation("L501", "active", renews=True), name="after the read"),
        talk(conversation("L502", "active", renews=True, reads=False), name="without the read"),
    ]
    labels = labels_of_replays(replays, successes(), CAPABILITY, {"precondition-verification"})
    verdicts = {(row.trajectory_id, row.capability): row.verdict for row in labels}
    assert verdicts == {
        ("after the read", CAPABILITY): Verdict.PRESENT,
        ("after the read", "precondition-verification"): Verdict.PRESENT,
        ("without the read", CAPABILITY): Verdict.NA,
        ("without the read", "precondition-verification"): Verdict.LACKING,
    }
    unknown = labels_of_replays(replays, successes(), "tone", {"tone"})
    assert {(row.capability, row.verdict) for row in unknown} == {("tone", Verdict.PRESENT)}
    assert labels_of_replays([], successes(), CAPABILITY, set()) == []


async def test_the_builtin_synthesizer_gets_the_replays_and_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episodes = successes()
    replay_of_task = talk(conversation("L501", "active", renews=True), name="replay")
    arguments: list[tuple[Sequence[Trajectory], Sequence[Label]]] = []

    def write(_: Capability, trajectories: Sequence[Trajectory], labels: Sequence[Label], **__: object) -> str:
        arguments.append((trajectories, labels))
        raise SynthesisError("seen enough")

    async def no_world(_: Context) -> None:
        return None

    monkeypatch.setattr(synthesize, "collected", lambda _: episodes)
    monkeypatch.setattr(synthesize, "solved_replays", lambda *_: [replay_of_task])
    monkeypatch.setattr(synthesize, "usable_world", no_world)
    monkeypatch.setattr(synthesize, "write_environment", write)
    with context_with_chain(tmp_path, {}) as context, pytest.raises(CapabilityError, match="seen enough"):
        await synthesize.synthesize(context, "date-reasoning", 0)
    ((trajectories, labels),) = arguments
    # They are numbered in their order; the chain's capability is none that the analyst knows here.
    assert len(trajectories) == len(episodes) + 1
    assert trajectories[-1].messages == replay_of_task.messages
    assert [row.verdict for row in labels if row.trajectory_id == trajectories[-1].id] == [Verdict.NA]
