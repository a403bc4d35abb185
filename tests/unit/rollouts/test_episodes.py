import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from sandbox.contract import Message, Score, Task, Tool
from sandbox.episodes import Step
from sandbox.errors import AgentFault
from store.types import EndCause, Outcome, Trajectory
from tests.local_source import LocalSource
from tests.unit.rollouts.scripted import Counting, CountingPolicy, Gate
from traced.inference.client import Completion
from traced.inference.errors import ContextLengthError, EngineError
from traced.inference.policies import Policy
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes
from traced.targets.errors import SimulatorError


def jobs(count: int) -> list[EpisodeJob]:
    return [EpisodeJob(seed, 0, "train", str(seed)) for seed in range(count)]


def run(
    count: int = 1,
    *,
    behaviour: Callable[[int, int], None] | None = None,
    policy: Policy | None = None,
    limits: Limits = Limits(),  # noqa: B008
    base_seed: int = 0,
) -> list[Trajectory]:
    async def collect() -> list[Trajectory]:
        async with LocalSource("counting", lambda: Counting(behaviour)) as source:
            selected_policy = policy or CountingPolicy()
            episodes = run_episodes(
                source, jobs(count), selected_policy, limits, model="base", temperature=1.0, base_seed=base_seed
            )
            return [trajectory async for trajectory in episodes]

    return asyncio.run(collect())


def test_an_episode_is_recorded_with_the_engine_ids_of_every_turn() -> None:
    [trajectory] = run()
    assert trajectory.outcome is Outcome.SUCCESS
    assert trajectory.end_cause is EndCause.DONE
    assert [m["role"] for m in trajectory.messages] == ["system", "user"] + ["assistant", "user"] * 2 + ["assistant"]
    assert [t.message_index for t in trajectory.turns] == [2, 4, 6]
    assert [(t.prompt_ids, t.completion_ids, t.logprobs) for t in trajectory.turns] == [
        ([1, 2, turn], [9, turn], [-0.5, -0.25]) for turn in range(3)
    ]
    assert trajectory.parts == {"said": 1.0}


def test_a_blocked_step_of_one_episode_delays_no_other() -> None:
    gate = Gate(seed=0, neighbours=7)  # episode 0's first step returns only once the 7 others are through their last
    trajectories = run(8, behaviour=gate)
    assert not gate.timed_out
    assert [t.outcome for t in trajectories] == [Outcome.SUCCESS] * 8
    assert [t.task_id for t in trajectories] == [str(n) for n in range(8)]


async def test_at_most_concurrency_episodes_are_open() -> None:
    lock, now, maximum = threading.Lock(), [0], [0]

    class CountingSource(Counting):
        def reset(self, seed: int) -> Task:
            with lock:
                now[0] += 1
                maximum[0] = max(maximum[0], now[0])
            return super().reset(seed)

        def score(self) -> Score:
            with lock:
                now[0] -= 1
            return super().score()

    async with LocalSource("counting", CountingSource) as source:
        limits = Limits(concurrency=3)
        async for _ in run_episodes(source, jobs(12), CountingPolicy(), limits, model="base", temperature=1.0):
            pass
    assert maximum[0] <= 3


@pytest.mark.parametrize(
    ("error", "cause", "text"),
    [
        (EngineError("the engine is gone", hint="traced doctor"), EndCause.ENGINE_ERROR, "the engine is gone"),
        (ZeroDivisionError("1/0"), EndCause.ENGINE_ERROR, "turn 0: ZeroDivisionError: 1/0"),
    ],
)
def test_an_engine_failure_is_infrastructure_and_ends_its_episode_only(
    error: Exception, cause: EndCause, text: str
) -> None:
    class Failing(CountingPolicy):
        async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
            if messages[0]["content"] == "seed 1":
                raise error
            return await super().complete(messages, tools, seed=seed)

    trajectories = run(3, policy=Failing())
    assert [t.outcome for t in trajectories] == [Outcome.SUCCESS, Outcome.INFRASTRUCTURE, Outcome.SUCCESS]
    assert trajectories[1].end_cause is cause
    assert text in trajectories[1].detail


@pytest.mark.parametrize(
    ("error", "cause"),
    [(RuntimeError("container gone"), EndCause.SANDBOX_ERROR), (SimulatorError("no user"), EndCause.SIMULATOR_ERROR)],
)
def test_an_environment_failure_is_infrastructure_and_keeps_the_recording(error: Exception, cause: EndCause) -> None:
    def failing(seed: int, step: int) -> None:
        if step == 1:
            raise error

    [trajectory] = run(behaviour=failing)
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.INFRASTRUCTURE, cause)
    assert str(error) in trajectory.detail
    assert "step of turn 1" in trajectory.detail
    assert len(trajectory.turns) == 2


async def test_a_step_past_its_time_limit_is_a_sandbox_failure() -> None:
    delay = threading.Event()

    def hang(seed: int, step: int) -> None:
        delay.wait(20)

    async with LocalSource("counting", lambda: Counting(hang)) as source:
        limits = Limits(step_timeout_s=0.05)
        episodes = run_episodes(source, jobs(1), CountingPolicy(), limits, model="base", temperature=1.0)
        [trajectory] = [t async for t in episodes]
        delay.set()
    assert trajectory.end_cause is EndCause.SANDBOX_ERROR
    assert "no answer in time" in trajectory.detail


def test_a_conversation_that_outgrows_the_context_is_the_agents_failure() -> None:
    [trajectory] = run(policy=CountingPolicy(error=ContextLengthError("2049 tokens do not fit 2048")))
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.FAILURE, EndCause.MAX_TOKENS)


def test_a_message_too_large_for_an_environment_is_the_agents_failure() -> None:
    def refuse(seed: int, step: int) -> None:
        if step == 1:
            raise AgentFault("the message for 'step' has 5000000 bytes, more than 4194304")

    [trajectory] = run(behaviour=refuse)
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.FAILURE, EndCause.MAX_TOKENS)
    assert len(trajectory.turns) == 2


def test_too_many_turns_end_an_episode_as_a_failure() -> None:
    [trajectory] = run(limits=Limits(max_turns=2))
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.FAILURE, EndCause.MAX_TURNS)
    assert len(trajectory.turns) == 2


@pytest.mark.parametrize("message", [{"role": "assistant", "content": None}, {"role": "assistant"}, {}])
def test_malformed_agent_messages_reach_the_environment(message: Message) -> None:
    class Odd(CountingPolicy):
        async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
            return Completion(message, [1], [2], [-1.0], "stop")

    [trajectory] = run(policy=Odd())
    assert (trajectory.outcome, trajectory.end_cause) == (Outcome.FAILURE, EndCause.DONE)


def test_sampling_seeds_depend_on_task_trial_turn_and_base_seed_alone() -> None:
    single, among = CountingPolicy(), CountingPolicy()
    run(1, policy=single)
    trajectories = run(4, policy=among)
    assert single.seeds[0] in among.seeds
    assert len(set(among.seeds)) == 12
    other = CountingPolicy()
    repeated = run(4, policy=other, base_seed=1)
    assert not set(other.seeds) & set(among.seeds)
    assert not {t.id for t in trajectories} & {t.id for t in repeated}
    assert [t.id for t in run(4)] == [t.id for t in trajectories]


async def test_leaving_early_closes_every_open_episode() -> None:
    environments: list[Any] = []
    closed: list[Any] = []

    class Waiting:
        async def reset(self, seed: int) -> Task:
            environments.append(self)
            return Task("s", [{"role": "user", "content": str(seed)}], [])

        async def step(self, message: Message) -> Step:
            if len(environments) == 4 and self is not environments[0]:
                await asyncio.Event().wait()
            return Step([], True)

        async def score(self) -> Score:
            return Score(1.0, True)

        async def close(self) -> None:
            closed.append(self)

    class Source:
        name = "waiting"
        concurrency = None

        def episode(self, trial: int = 0) -> Waiting:
            return Waiting()

    limits = Limits(concurrency=4)
    episodes = run_episodes(Source(), jobs(9), CountingPolicy(), limits, model="base", temperature=1.0)
    async with aclosing(episodes) as running:
        async for _ in running:
            break
    assert environments
    assert set(closed) == set(environments)


@pytest.mark.parametrize("moment", ["reset", "step", "score"])
async def test_a_stop_that_comes_as_a_call_returns_is_not_lost(moment: str) -> None:
    running: list[asyncio.Task[None]] = []

    class Stopping:
        seed = -1

        def stop_at(self, name: str) -> None:
            if name == moment and self.seed == 0:
                running[0].cancel()

        async def reset(self, seed: int) -> Task:
            self.seed = seed
            self.stop_at("reset")
            return Task("s", [{"role": "user", "content": str(seed)}], [])

        async def step(self, message: Message) -> Step:
            self.stop_at("step")
            return Step([], True)

        async def score(self) -> Score:
            self.stop_at("score")
            return Score(1.0, True)

        async def close(self) -> None:
            pass

    class Source:
        name = "stopping"
        concurrency = None

        def episode(self, trial: int = 0) -> Stopping:
            return Stopping()

    async def play() -> None:
        async for _ in run_episodes(
            Source(), jobs(3), CountingPolicy(), Limits(concurrency=1), model="base", temperature=1.0
        ):
            pass

    running.append(asyncio.create_task(play()))
    with pytest.raises(asyncio.CancelledError):
        await running[0]
