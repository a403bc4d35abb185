"""gepa on a scripted policy: no model that is small enough for a test can follow a new instruction, so what an episode
is worth is computed from the patch here, and from the seed."""

import asyncio
import gc
from dataclasses import dataclass, field, replace

import pytest

from agents.errors import BudgetSpent
from store.types import Outcome, Trajectory
from tests.unit.store.chain import trajectory
from traced.prompt_optimization.evolution import Evolved, Plan, evolve

ADVICE = ["look the order up first", "ask for the number", "finish every request", "say the date"]
PLAN = Plan(training=range(100), validation=range(1000, 1012), minibatch=4, rollouts=400, seed=7)


@dataclass
class Scripted:
    """Half of the episodes need nothing, each of the others one piece of advice; proposals add one piece at a time."""

    advice: list[str]
    stops: int = 10**9  # after so many proposals nobody pays any more
    fails: int = 10**9
    episodes_played: list[tuple[str, int]] = field(default_factory=list)
    shown_episodes: list[list[Trajectory]] = field(default_factory=list)
    proposals: int = 0

    async def play(self, patch: str, seeds: list[int]) -> list[Trajectory]:
        self.episodes_played += [(patch, seed) for seed in seeds]
        if len(self.episodes_played) > self.fails:
            raise RuntimeError("the sandbox is gone")
        return [self._episode(patch, seed) for seed in seeds]

    async def propose(self, patch: str, episodes: list[Trajectory], number: int) -> str:
        self.shown_episodes.append(episodes)
        assert number == self.proposals
        self.proposals += 1
        if self.proposals > self.stops:
            raise BudgetSpent("9,000 of 8,000 tokens are spent")
        return f"{patch}\n{self.advice[number % len(self.advice)]}"

    def _episode(self, patch: str, seed: int) -> Trajectory:
        requirement = (ADVICE * 2)[seed % 8] if seed % 8 < 4 else ""
        right = requirement in patch
        outcome = Outcome.SUCCESS if right else Outcome.FAILURE
        return replace(trajectory(f"{patch}-{seed}", outcome), task_id=str(seed), reward=1.0 if right else 0.2)


async def evolved(script: Scripted, plan: Plan = PLAN) -> Evolved:
    return await evolve("Be good.", plan, script.play, script.propose)


async def test_improvements_are_kept_until_the_score_is_perfect() -> None:
    script = Scripted(ADVICE)
    result = await evolved(script)
    assert all(piece in result.text for piece in ADVICE)
    assert (result.validation, result.stopped_by) == (1.0, "perfect")
    assert result.first < 0.7
    assert result.kept >= len(ADVICE)
    assert result.rollouts == len(script.episodes_played) <= PLAN.rollouts


async def test_no_step_is_begun_that_the_budget_might_not_hold() -> None:
    script = Scripted(["be kind"])
    result = await evolved(script)
    assert result.text == "Be good."
    assert result.stopped_by == "rollouts"
    assert result.rollouts == len(script.episodes_played)
    assert PLAN.rollouts - PLAN.step < result.rollouts <= PLAN.rollouts
    assert result.proposed == script.proposals


async def test_a_budget_that_holds_no_step_leaves_the_beginning() -> None:
    result = await evolved(script := Scripted(ADVICE), replace(PLAN, rollouts=PLAN.step))
    assert (result.text, result.proposed, len(script.episodes_played)) == ("Be good.", 0, len(PLAN.validation))


async def test_training_and_validation_are_kept_apart_and_only_failures_are_worked_on() -> None:
    script = Scripted(ADVICE)
    await evolved(script)
    assert {seed for _, seed in script.episodes_played} <= {*PLAN.training, *PLAN.validation}
    assert {int(episode.task_id) for episodes in script.shown_episodes for episode in episodes} <= set(PLAN.training)
    assert all(any(episode.reward < 1 for episode in episodes) for episodes in script.shown_episodes)
    assert all(len(episodes) == PLAN.minibatch for episodes in script.shown_episodes)


async def test_repeating_with_stored_replies_gives_the_same_patch() -> None:
    first, second = Scripted(ADVICE), Scripted(ADVICE)
    assert await evolved(first) == await evolved(second)
    assert first.episodes_played == second.episodes_played


async def test_nobody_pays_any_more_and_the_best_so_far_counts() -> None:
    script = Scripted(ADVICE, stops=6)
    result = await evolved(script)
    assert result.stopped_by == "9,000 of 8,000 tokens are spent"
    assert script.proposals == 7
    assert result.proposed == 6
    assert result.kept >= 1
    assert result.validation > result.first


@pytest.mark.parametrize("answer", ["", "Be good."])
async def test_an_answer_that_changes_nothing_is_not_played(answer: str) -> None:
    script = Scripted([])

    async def nothing(patch: str, episodes: list[Trajectory], number: int) -> str:
        return answer

    result = await evolve("Be good.", PLAN, script.play, nothing)
    assert result.kept == 0
    assert {patch for patch, _ in script.episodes_played} == {"Be good."}
    assert result.stopped_by == "rollouts"


@pytest.mark.parametrize("fails", [5, 14, 30])
async def test_a_failure_of_the_machinery_is_no_reward_and_comes_out_as_it_was(fails: int) -> None:
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        await evolved(Scripted(ADVICE, fails=fails))


async def test_a_proposal_that_fails_is_not_asked_for_a_second_time() -> None:
    script, proposals = Scripted(ADVICE), []

    async def unavailable(patch: str, episodes: list[Trajectory], number: int) -> str:
        proposals.append(number)
        raise ConnectionError("nobody answers")

    with pytest.raises(ConnectionError, match="nobody answers"):
        await evolve("Be good.", PLAN, script.play, unavailable)
    assert proposals == [0]


@pytest.mark.parametrize("position", ["play", "propose"])
def test_a_cancellation_ends_the_current_answer_and_the_thread(position: str) -> None:
    script, finished = Scripted(ADVICE), []

    async def cancelled() -> None:
        started = asyncio.Event()

        async def forever(*_: object) -> list[Trajectory]:
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                finished.append(position)
            raise AssertionError

        play, propose = (forever, script.propose) if position == "play" else (script.play, forever)
        work = asyncio.create_task(evolve("Be good.", PLAN, play, propose))  # type: ignore[arg-type]
        await started.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    gc.collect()  # an exception that nobody has seen would be reported here
    assert finished == [position]
