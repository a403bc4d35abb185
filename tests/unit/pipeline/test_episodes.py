"""Episodes that are lost to a failing engine are played again within the run."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.client import SandboxSource
from sandbox.contract import Message, Tool
from store.database import read_session
from store.repositories.trajectories import judged_ids
from store.types import Outcome, Trajectory
from tests.desk import DESK
from tests.local_source import LocalSource
from tests.unit.pipeline.contexts import context_with_chain
from traced.core.errors import StageError
from traced.inference.client import Completion
from traced.inference.errors import EngineError
from traced.pipeline.context import Context
from traced.pipeline.episodes import episodes, limits_of
from traced.rollouts.episodes import EpisodeJob, Limits
from traced.rollouts.step_limit import step_timeout_s
from traced.targets.desk import Desk
from traced.targets.play import SilentUser
from traced.targets.process import Launch, ProcessSource

WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"

WORLDS = Path(__file__).parents[1] / "targets" / "worlds.py"
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


class HeldPolicy:
    """Ends every conversation but the first, which waits for ever."""

    def __init__(self) -> None:
        self.held_key = ""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        self.held_key = self.held_key or str(messages)
        if str(messages) == self.held_key:
            await asyncio.Event().wait()
        return Completion({"role": "assistant", "content": "Good bye."}, [1], [2], [-0.1], "stop")


async def test_episodes_behind_a_long_one_are_reported_and_kept_as_they_end(tmp_path: Path) -> None:
    ticks: list[Trajectory | None] = []
    all_but_first = asyncio.Event()

    def tick(trajectory: Trajectory | None) -> None:
        ticks.append(trajectory)
        if len(ticks) == len(JOBS) - 1:
            all_but_first.set()

    with context_with_chain(tmp_path, {"collect.concurrency": len(JOBS)}) as context:
        async with DESK.source() as source:
            run = asyncio.create_task(
                episodes(context, source, JOBS, HeldPolicy(), model="base", temperature=1.0, tick=tick)
            )
            async with asyncio.timeout(20):
                await all_but_first.wait()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
        with read_session(context.store) as session:
            stored_ids = judged_ids(session, [trajectory.id for trajectory in ticks if trajectory])
    assert len(stored_ids) == len(JOBS) - 1


async def test_an_ended_episode_is_in_the_store_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.pipeline.episodes.KEEP_S", 0.01)
    with context_with_chain(tmp_path, {"collect.concurrency": len(JOBS)}) as context:
        ticks: list[Trajectory | None] = []

        def count_stored() -> int:
            with read_session(context.store) as session:
                return len(judged_ids(session, [trajectory.id for trajectory in ticks if trajectory]))

        async with DESK.source() as source:
            run = asyncio.create_task(
                episodes(context, source, JOBS, HeldPolicy(), model="base", temperature=1.0, tick=ticks.append)
            )
            async with asyncio.timeout(20):
                while count_stored() < len(JOBS) - 1:  # noqa: ASYNC110 (the store has no event for it)
                    await asyncio.sleep(0.01)
            assert not run.done()
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run


async def test_most_episodes_lost_twice_end_the_stage_with_the_reason(context: Context) -> None:
    with pytest.raises(EngineError, match=r"6 of 6 episodes of .* were lost to .*: the engine is gone"):
        await play(context, UnsteadyPolicy(failures=2))


async def test_a_target_that_fails_is_the_next_to_be_checked(tmp_path: Path) -> None:
    world = {"target.name": "acme", "target.kind": "python", "target.factory": f"{WORLDS}:Refusing"}
    with context_with_chain(tmp_path, world) as acme:
        async with acme.target_source() as source:
            with pytest.raises(StageError, match=r"6 of 6 episodes of acme were lost to target_error: .*broke") as info:
                await episodes(acme, source, JOBS, UnsteadyPolicy(failures=0), model="base", temperature=1.0)
    assert info.value.hint == "run traced target check acme, or traced doctor, then repeat the command"


def test_an_episode_has_the_limits_of_its_target(tmp_path: Path) -> None:
    options = ["max_turns=9", "concurrency=2", "step_s=50.0"]
    table = {"name": "acme", "kind": "python", "factory": f"{WORLDS}:WithTasks", "options": options}
    overrides: dict[str, object] = {f"target.{key}": value for key, value in table.items()}
    sandbox = {"sandbox.call_seconds": 7.0, "collect.max_turns": 5, "collect.concurrency": 6}
    with context_with_chain(tmp_path, {**overrides, **sandbox}) as context:
        acme = ProcessSource("acme", Launch("", tmp_path))
        assert limits_of(context, acme) == Limits(9, 2, step_timeout_s(50.0))
        assert limits_of(context, LocalSource("dates", Desk)) == Limits(5, 6, step_timeout_s(7.0))
    with context_with_chain(tmp_path / "b", overrides | {"target.step_s": 80.0, "collect.concurrency": 1}) as context:
        assert limits_of(context, acme) == Limits(9, 1, step_timeout_s(80.0))


def test_a_step_waits_for_a_user_that_is_a_model(tmp_path: Path) -> None:
    table = {"name": "acme", "kind": "python", "factory": f"{WORLDS}:WithUser", "step_s": 10.0}
    user = {"target.user.timeout_s": 100.0, "target.user.patience_s": 20.0}
    overrides: dict[str, object] = {f"target.{key}": value for key, value in table.items()}
    with context_with_chain(tmp_path, {**overrides, **user}) as context:
        # Four messages of the user, each in up to three attempts.
        wait_s = 4 * 3 * 120.0
        acme = ProcessSource("acme", Launch("", tmp_path), user=SilentUser())
        assert limits_of(context, acme).step_timeout_s >= 10.0 + wait_s
        assert limits_of(context, SandboxSource("", user=SilentUser())).step_timeout_s >= 5.0 + wait_s
        assert limits_of(context, SandboxSource("")).step_timeout_s == 30.0


@pytest.mark.parametrize(("call_seconds", "step_s"), [(5.0, 30.0), (600.0, 610.0)])
def test_a_step_has_longer_than_a_call_in_the_sandbox(call_seconds: float, step_s: float) -> None:
    assert step_timeout_s(call_seconds) == step_s
