"""The episodes of a gate's replay: rounds share no seed, and each task has its trials."""

from dataclasses import replace
from pathlib import Path

from store.repositories.trajectories import save_trajectories
from tests.unit.agents.synthesis.conversations import demonstrations
from tests.unit.targets.conversations import new_cycle
from traced.pipeline.gate import policy_of
from traced.pipeline.held_out_replay import TRIALS_PER_ROUND, HeldOutReplay, make_replay
from traced.targets.conversation_target import HELD_OUT


def test_rounds_share_no_seed() -> None:
    replay = HeldOutReplay("d", {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8]}, 2)
    first, second = ([(job.task_id, job.trial, job.seed) for job in replay.jobs(number)] for number in (1, 2))
    assert first == [("a", 0, 1), ("a", 1, 2), ("b", 0, 5), ("b", 1, 6)]
    assert second == [("a", 2, 3), ("a", 3, 4), ("b", 2, 7), ("b", 3, 8)]


async def test_every_round_has_trials_of_every_task(tmp_path: Path) -> None:
    rows = [replace(row, source="acme", split=HELD_OUT) for row in demonstrations()[0][:30]]
    with new_cycle(tmp_path, **{"gate.seeds": 1000, "gate.max_rounds": 2}) as context:
        with context.write_session() as session:
            save_trajectories(session, rows)
        replay = await make_replay(context)
        assert replay is not None
        assert replay.trials == TRIALS_PER_ROUND
        assert len(replay.jobs(1)) == len(replay.jobs(2)) == TRIALS_PER_ROUND * len(replay.seeds)
        policy = policy_of(context)
        assert (policy.plays_target, policy.replay_tasks) == (False, len(replay.seeds))
        assert await make_replay(context) == replay
