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
    played: list[tuple[str, int]] = field(default_factory=list)
    shown: list[list[Trajectory]] = field(default_factory=list)
    asked: int = 0

    async def play(self, patch: str, seeds: list[int]) -> list[Trajectory]:
        self.played += [(patch, seed) for seed in seeds]
        if len(self.played) > self.fails:
            raise RuntimeError("the sandbox is gone")
        return [self._episode(patch, seed) for seed in seeds]

    async def propose(self, patch: str, episodes: list[Trajectory], number: int) -> str:
        self.shown.append(episodes)
        assert number == self.asked
        self.asked += 1
        if self.asked > self.stops:
            raise BudgetSpent("9,000 of 8,000 tokens are spent")
        return f"{patch}\n{self.advice[number % len(self.advice)]}"

    def _episode(self, patch: str, seed: int) -> Trajectory:
        needed = (ADVICE * 2)[seed % 8] if seed % 8 < 4 else ""
        right = needed in patch
        outcome = Outcome.SUCCESS if right else Outcome.FAILURE
        return replace(trajectory(f"{patch}-{seed}", outcome), task_id=str(seed), reward=1.0 if right else 0.2)


def evolved(script: Scripted, plan: Plan = PLAN) -> Evolved:
    return asyncio.run(evolve("Be good.", plan, script.play, script.propose))


def test_what_helps_is_kept_until_nothing_is_missing() -> None:
    script = Scripted(ADVICE)
    found = evolved(script)
    assert all(piece in found.text for piece in ADVICE)
    assert (found.validation, found.stopped_by) == (1.0, "perfect")
    assert found.first < 0.7
    assert found.kept >= len(ADVICE)
    assert found.rollouts == len(script.played) <= PLAN.rollouts


def test_no_step_is_begun_that_the_budget_might_not_hold() -> None:
    script = Scripted(["be kind"])
    found = evolved(script)
    assert found.text == "Be good."
    assert found.stopped_by == "rollouts"
    assert found.rollouts == len(script.played)
    assert PLAN.rollouts - PLAN.step < found.rollouts <= PLAN.rollouts
    assert found.proposed == script.asked


def test_a_budget_that_holds_no_step_leaves_the_beginning() -> None:
    found = evolved(script := Scripted(ADVICE), replace(PLAN, rollouts=PLAN.step))
    assert (found.text, found.proposed, len(script.played)) == ("Be good.", 0, len(PLAN.validation))


def test_training_and_validation_are_kept_apart_and_only_failures_are_worked_on() -> None:
    script = Scripted(ADVICE)
    evolved(script)
    assert {seed for _, seed in script.played} <= {*PLAN.training, *PLAN.validation}
    assert {int(one.task_id) for episodes in script.shown for one in episodes} <= set(PLAN.training)
    assert all(any(one.reward < 1 for one in episodes) for episodes in script.shown)
    assert all(len(episodes) == PLAN.minibatch for episodes in script.shown)


def test_who_begins_again_with_what_is_kept_comes_to_the_same() -> None:
    first, second = Scripted(ADVICE), Scripted(ADVICE)
    assert evolved(first) == evolved(second)
    assert first.played == second.played


def test_nobody_pays_any_more_and_the_best_so_far_counts() -> None:
    script = Scripted(ADVICE, stops=6)
    found = evolved(script)
    assert found.stopped_by == "9,000 of 8,000 tokens are spent"
    assert script.asked == 7
    assert found.proposed == 6
    assert found.kept >= 1
    assert found.validation > found.first


@pytest.mark.parametrize("answer", ["", "Be good."])
def test_an_answer_that_changes_nothing_is_not_played(answer: str) -> None:
    script = Scripted([])

    async def nothing(patch: str, episodes: list[Trajectory], number: int) -> str:
        return answer

    found = asyncio.run(evolve("Be good.", PLAN, script.play, nothing))
    assert found.kept == 0
    assert {patch for patch, _ in script.played} == {"Be good."}
    assert found.stopped_by == "rollouts"


@pytest.mark.parametrize("fails", [5, 14, 30])
def test_a_failure_of_the_machinery_is_no_reward_and_comes_out_as_it_was(fails: int) -> None:
    with pytest.raises(RuntimeError, match="the sandbox is gone"):
        evolved(Scripted(ADVICE, fails=fails))


def test_a_proposal_that_fails_is_not_asked_for_a_second_time() -> None:
    script, asked = Scripted(ADVICE), []

    async def unavailable(patch: str, episodes: list[Trajectory], number: int) -> str:
        asked.append(number)
        raise ConnectionError("nobody answers")

    with pytest.raises(ConnectionError, match="nobody answers"):
        asyncio.run(evolve("Be good.", PLAN, script.play, unavailable))
    assert asked == [0]


@pytest.mark.parametrize("where", ["play", "propose"])
def test_cancelled_it_ends_what_is_at_work_and_its_thread(where: str) -> None:
    script, ended = Scripted(ADVICE), []

    async def cancelled() -> None:
        reached = asyncio.Event()

        async def forever(*_: object) -> list[Trajectory]:
            reached.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(where)
            raise AssertionError

        play, propose = (forever, script.propose) if where == "play" else (script.play, forever)
        work = asyncio.create_task(evolve("Be good.", PLAN, play, propose))  # type: ignore[arg-type]
        await reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    gc.collect()  # an exception that nobody has seen would be reported here
    assert ended == [where]
