"""Episodes that are lost to a failing engine are played again within the run."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.contract import Message, Tool
from store.types import Outcome, Trajectory
from tests.unit.pipeline.contexts import context_with_chain
from traced.inference.client import Completion
from traced.inference.errors import EngineError
from traced.pipeline.context import Context
from traced.pipeline.episodes import episodes
from traced.rollouts.episodes import EpisodeJob
from traced.rollouts.step_limit import step_timeout_s
from traced.targets.registry import DESK

JOBS = [EpisodeJob(seed, 0, "train", str(seed)) for seed in range(6)]


class UnsteadyPolicy:
    """Ends every conversation; its engine fails the first ``failures`` times in each."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.calls: Counter[str] = Counter()

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        key = str(messages)
        self.calls[key] += 1
        if self.calls[key] <= self.failures:
            raise EngineError("the engine is gone")
        return Completion({"role": "assistant", "content": "Good bye."}, [1], [2], [-0.1], "stop")


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Context]:
    with context_with_chain(tmp_path, {"collect.concurrency": 1}) as context:
        yield context


async def play(context: Context, policy: UnsteadyPolicy) -> tuple[list[Trajectory], int]:
    """Return the trajectories, and the number of reported ones."""
    ticks: list[Trajectory | None] = []
    async with DESK.source() as source:
        trajectories = await episodes(context, source, JOBS, policy, model="base", temperature=1.0, tick=ticks.append)
    return trajectories, len(ticks)


async def test_lost_episodes_are_played_again_and_reported_once(context: Context) -> None:
    policy = UnsteadyPolicy(failures=1)
    trajectories, count = await play(context, policy)
    assert [trajectory.task_id for trajectory in trajectories] == [job.task_id for job in JOBS]
    assert all(trajectory.outcome is not Outcome.INFRASTRUCTURE for trajectory in trajectories)
    assert count == len(JOBS)
    # Stored: a second call plays none.
    calls = policy.calls.total()
    assert (await play(context, policy))[0] == trajectories
    assert policy.calls.total() == calls


async def test_most_episodes_lost_twice_end_the_stage_with_the_reason(context: Context) -> None:
    with pytest.raises(EngineError, match=r"6 of 6 episodes of .* were lost to .*: the engine is gone"):
        await play(context, UnsteadyPolicy(failures=2))


@pytest.mark.parametrize(("call_seconds", "step_s"), [(5.0, 30.0), (600.0, 610.0)])
def test_a_step_has_longer_than_a_call_in_the_sandbox(call_seconds: float, step_s: float) -> None:
    assert step_timeout_s(call_seconds) == step_s
