"""TRL's ``rollout_func`` of a training job: which rollouts an iteration has, from which policy, and their rows.

With ``overlap`` the next iteration's rollouts are sampled during the update, from the policy before it. A run that is
resumed, or goes back to an earlier policy, samples its next iteration anew.

Hints: a rollout that was sampled with a hint is trained on without it, so its row has the prompt without the hint and
the same completion. The log-probs of its tokens are those with the hint; the trainer takes its own in their place, so
that the ratio to the sampling policy is 1. The ratio to the policy with the hint would be small for just those tokens
that the hint has brought about, and their gradient with it; and it would be clipped for tokens that the hint has made
rare. The price is a bias: these tokens are not the policy's own choice. So their rollouts count neither in the success
and reward of an iteration nor in the check of the sampling policy. Hinted and other rollouts of a seed are one group,
in which a seed that only the hint solves has a gradient. The paper (TRACE) does not mention hints; its authors' code
shows them and strips them before the update. The rows of solutions that replace rollouts of a group without a success
(``traced.training.demonstrations``) are treated alike; the policy's figures count the rollouts that they replace.

How it fails: ``EngineLost``, ``EnvironmentFailed`` or ``SimulatorError`` if every group of an iteration was lost.
"""

import concurrent.futures
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from traced.core.seeds import derive_seed
from traced.rollouts.errors import Fault
from traced.targets.errors import SimulatorError
from traced.training.demonstrations import demonstrations
from traced.training.errors import EngineLost, EnvironmentFailed, TrainingPaused
from traced.training.job import Validation
from traced.training.rollouts import Conversation, End, IterationRollouts, Rollout, Sampler

PAUSE_POLL_S = 1.0


@dataclass
class Batch:
    """The outcome of an iteration's rollouts; a lost group has no rewards.

    Rewards, servers and ``is_off_policy`` are those of the rows; all other figures are those of the rollouts that were
    played.

    Args:
        rewards: One per rollout; None for the rollouts of a lost group.
        lengths: Sampled tokens of each scored rollout.
        ends: By what the scored rollouts ended, as counts.
        servers: Per row, per completion token, the engine that sampled it; "" for the environment's tokens.
        busy_share: During how much of the time in which an episode waited for it the engine served requests.
        policy: The iteration whose weights sampled, counted from 0: its own, or with overlap the one before.
        seconds: For how long the trainer waited for the rollouts.
        sampling_seconds: For how long they were played; with overlap most of it during the last update.
        validation: The figures of the policy, if it was validated beside the rollouts.
        own_rewards: The rewards of the scored rollouts without a hint.
        demonstrations: The number of rows with a solution in the place of a rollout.
        is_off_policy: Per row whether the policy did not choose its tokens by itself: the row was sampled with a hint,
            which its prompt has no more, or is a solution.
        hinted_scored: The number of scored rollouts with a hint.
        hinted_successes: The number of those that succeeded.
        seeds: Per row the seed of its episode.
        entropy: An estimate of the policy's entropy per token, in nats: the mean of -log p over the sampled tokens.
    """

    rewards: list[float | None]
    successes: int
    scored: int
    policy_tokens: int
    lengths: list[int]
    turns: int
    ends: Counter[End]
    servers: list[list[str]]
    retried: int
    lost_groups: int
    busy_share: float
    policy: int
    seconds: float
    sampling_seconds: float
    own_rewards: list[float]
    validation: Validation | None = None
    entropy: float = math.nan
    demonstrations: int = 0
    is_off_policy: list[bool] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    hinted_scored: int = 0
    hinted_successes: int = 0

    @property
    def success(self) -> float:
        """Return the success rate of the scored rollouts without a hint."""
        return (self.successes - self.hinted_successes) / (self.scored - self.hinted_scored)

    @property
    def reward(self) -> float:
        """Return the mean reward of the scored rollouts without a hint."""
        return sum(self.own_rewards) / len(self.own_rewards)

    def off_policy_metrics(self) -> dict[str, float]:
        """Return the success rate of the rollouts with a hint and the number of solutions, if there are any."""
        hinted = {"hinted_success": self.hinted_successes / self.hinted_scored} if self.hinted_scored else {}
        return hinted | ({"demonstrations": float(self.demonstrations)} if self.demonstrations else {})


@dataclass
class _Sampling:
    """The rollouts of an iteration that are being played, and the iteration whose weights sample."""

    iteration: int
    seeds: list[int]
    policy: int
    future: "Future[IterationRollouts]"


class PolicyValidation(Protocol):
    """Validates policies beside the rollouts that are sampled from them, as ``Validations`` does."""

    def seeds(self, policy: int, *, is_last: bool = False) -> list[int]:
        """Return the seeds to validate the policy after this number of updates on; none if it is not its turn."""
        ...

    def is_open(self, policy: int) -> bool:
        """Return whether the policy has no figures yet."""
        ...

    def begin(self, model: Any, policy: int) -> None:
        """Keep the policy, whose weights ``model`` has."""
        ...

    def end(self, policy: int, rollouts: Sequence[Rollout]) -> Validation | None:
        """Keep the policy's figures."""
        ...


class SeedChoice(Protocol):
    """Chooses the seeds of iterations by the groups before them, as ``OpenSeeds`` does."""

    def draw(self, iteration: int, fresh: Sequence[int], iterations: int) -> list[int]:
        """Return the seeds of an iteration; the groups of this number of iterations count."""
        ...

    def record(self, iteration: int, rollouts: Sequence[Rollout]) -> None:
        """Keep the groups of an iteration."""
        ...


@dataclass
class RolloutFunction:
    """TRL's ``rollout_func(prompts, trainer)``; keeps the last batch for the metrics.

    Args:
        filler: A token id for the row of a rollout that never got a token.
        on_played: Gets the number of the iteration, from 1, and its rollouts.
        next_seeds: Returns the group seeds of an iteration, counted from 0, or None after the last one; the iteration
            is then sampled during the update before it. None: strictly on-policy.
        may_pause: Returns whether the rollouts of an iteration, counted from 0, may be given up for a pause.
        open_seeds: Draws a share of the seeds from earlier groups whose rewards differed.
        demonstrations: The number of rollouts of a group without a success that the environment's solution replaces.
        validations: Says which policies are validated beside the rollouts that are sampled from them.
    """

    sampler: Sampler
    rollouts: int
    seed: int
    filler: int
    on_played: Callable[[int, list[Rollout]], None]
    next_seeds: Callable[[int], list[int] | None] | None = None
    may_pause: Callable[[int], bool] = lambda iteration: False
    validations: PolicyValidation | None = None
    open_seeds: SeedChoice | None = None
    demonstrations: int = 0
    last: Batch = field(init=False)
    _ahead: _Sampling | None = field(init=False, default=None)
    _running: _Sampling | None = field(init=False, default=None)
    _validated: set[int] = field(init=False, default_factory=set)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        """Play the rollouts of one iteration.

        A prompt is its row's environment seed as text, repeated K times for its group. Rows come back in that order,
        with ``env_mask`` 1 on the policy's tokens and ``reward`` None for lost groups.
        """
        started = time.perf_counter()
        iteration = int(trainer.state.global_step)
        seeds = [int(prompt) for prompt in prompts[:: self.rollouts]]
        sampling, self._ahead = self._ahead, None
        # A resumed run has nothing ahead.
        if sampling is None:
            sampling = self._start(trainer.model, iteration, iteration, seeds)
        if (sampling.iteration, sampling.seeds) != (iteration, seeds):
            raise RuntimeError(f"rollouts of iteration {sampling.iteration} were sampled, {iteration} was requested")
        self._running = sampling
        while not concurrent.futures.wait([sampling.future], timeout=PAUSE_POLL_S).done:
            if self.may_pause(iteration):
                raise TrainingPaused(f"paused during the rollouts of iteration {iteration + 1}")
        outcome = sampling.future.result()
        self._running = None
        self.on_played(iteration + 1, outcome.rollouts)
        row_rollouts = self._with_demonstrations(outcome.rollouts)
        if self.open_seeds is not None:
            self.open_seeds.record(iteration, row_rollouts)
        self.last = self._batch(outcome, row_rollouts, sampling.policy, time.perf_counter() - started)
        if self.validations is not None and outcome.validation:
            self.last.validation = self.validations.end(sampling.policy, outcome.validation)
        self._start_ahead(trainer.model, iteration)
        rows = [self._row(rollout, is_lost) for rollout, is_lost in _with_losses(row_rollouts)]
        columns = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return {**{name: [row[i] for row in rows] for i, name in enumerate(columns)}, "reward": self.last.rewards}

    def validate(self, model: Any, policy: int) -> None:
        """Validate the policy that a run ends with, unless it was; ``model`` has its weights."""
        if self.validations is None or policy in self._validated or not self.validations.is_open(policy):
            return
        self._running = sampling = self._start(model, policy, policy, [], is_last=True)
        self.validations.end(policy, sampling.future.result().validation)
        self._running = None

    def restart(self, temperature: float, hinted_rollouts: int) -> None:
        """Drop rollouts ahead, whose policy is given up, and sample at this temperature from now on.

        Args:
            hinted_rollouts: How many rollouts of each group have the hint.
        """
        if self._ahead is not None:
            self._ahead.future.cancel()
            concurrent.futures.wait([self._ahead.future])
            self._ahead = None
        self.sampler.limits = replace(self.sampler.limits, temperature=temperature)
        self.sampler.hinted_rollouts = hinted_rollouts

    def begin_update(self) -> None:
        """Let the engine sleep where it shares the trainer's GPU; it samples nothing until ``end_update``."""
        self.sampler.engine.begin_update()

    def end_update(self) -> None:
        """Wake the engine up."""
        self.sampler.engine.end_update()

    def close(self) -> None:
        """Cancel rollouts that are not needed any more, those of an interrupted iteration as well; close the engine."""
        futures = [sampling.future for sampling in (self._running, self._ahead) if sampling is not None]
        for future in futures:
            future.cancel()
        concurrent.futures.wait(futures)
        self._running = self._ahead = None
        self.sampler.engine.close()

    def _start(self, model: Any, iteration: int, policy: int, seeds: list[int], *, is_last: bool = False) -> _Sampling:
        validation: list[int] = []
        # With overlap the first policy of a process samples two iterations.
        if self.validations is not None and policy not in self._validated:
            validation = self.validations.seeds(policy, is_last=is_last)
            if validation:
                self._validated.add(policy)
                self.validations.begin(model, policy)
        self.sampler.engine.synchronise(model, policy)
        sampling_seed = derive_seed(self.seed, "rollout", iteration)
        group_seeds = seeds if self.open_seeds is None else self.open_seeds.draw(iteration, seeds, policy)
        future = self.sampler.start(group_seeds, self.rollouts, sampling_seed, validation)
        return _Sampling(iteration, seeds, policy, future)

    def _start_ahead(self, model: Any, iteration: int) -> None:
        """Start the next iteration's rollouts from the current weights, which the update has not changed yet."""
        seeds = self.next_seeds(iteration + 1) if self.next_seeds is not None else None
        if seeds is not None:
            self._ahead = self._start(model, iteration + 1, iteration, seeds)

    def _with_demonstrations(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Return the rollouts that are trained on: those played, with solutions in the place of some."""
        if not self.demonstrations:
            return rollouts
        task = self.sampler.portal.start_task_soon(demonstrations, self.sampler, rollouts, self.demonstrations)
        solutions = task.result()
        return [solutions.get(position, rollout) for position, rollout in enumerate(rollouts)]

    def _batch(self, outcome: IterationRollouts, row_rollouts: list[Rollout], policy: int, seconds: float) -> Batch:
        rollouts = outcome.rollouts
        scored = [rollout for rollout, is_lost in _with_losses(rollouts) if not is_lost]
        if not scored:
            raise _all_lost(rollouts)
        conversations = [rollout.conversation for rollout in scored if rollout.conversation is not None]
        lengths = [sum(conversation.mask) for conversation in conversations]
        # The environment's tokens have 0.
        surprise = -sum(sum(conversation.logprobs) for conversation in conversations)
        groups = {rollout.group for rollout in rollouts}
        hinted = [rollout for rollout in scored if rollout.hint]
        solution_rows = {position for position, rollout in enumerate(rollouts) if row_rollouts[position] is not rollout}
        return Batch(
            rewards=[None if is_lost else rollout.reward for rollout, is_lost in _with_losses(row_rollouts)],
            successes=sum(rollout.success for rollout in scored),
            scored=len(scored),
            policy_tokens=sum(lengths),
            lengths=lengths,
            turns=sum(rollout.turns for rollout in scored),
            ends=Counter(rollout.end for rollout in scored if rollout.end is not None),
            servers=[self._servers(rollout, is_lost) for rollout, is_lost in _with_losses(row_rollouts)],
            retried=len(outcome.retried),
            lost_groups=len(groups) - len({rollout.group for rollout in scored}),
            busy_share=outcome.busy_share,
            policy=policy,
            seconds=seconds,
            sampling_seconds=outcome.seconds,
            entropy=surprise / max(1, sum(lengths)),
            own_rewards=[rollout.reward or 0.0 for rollout in scored if not rollout.hint],
            demonstrations=len(solution_rows),
            is_off_policy=[
                bool(rollout.hint) or position in solution_rows for position, rollout in enumerate(rollouts)
            ],
            seeds=[rollout.seed for rollout in rollouts],
            hinted_scored=len(hinted),
            hinted_successes=sum(rollout.success for rollout in hinted),
        )

    def _row(self, rollout: Rollout, is_lost: bool) -> tuple[list[int], list[int], list[float], list[int]]:
        """Return a row of tokens; one masked filler token if there is none (TRL takes no empty completion)."""
        conversation: Conversation | None = rollout.conversation
        if is_lost or conversation is None or not conversation.ids:
            prompt = conversation.prompt_ids if conversation is not None and not is_lost else [self.filler]
            return prompt, [self.filler], [0.0], [0]
        prompt = rollout.stripped_prompt_ids or conversation.prompt_ids
        return prompt, conversation.ids, conversation.logprobs, conversation.mask

    def _servers(self, rollout: Rollout, is_lost: bool) -> list[str]:
        has_tokens = not is_lost and rollout.conversation is not None and rollout.conversation.ids
        return rollout.conversation.servers if has_tokens and rollout.conversation is not None else [""]


def _with_losses(rollouts: Sequence[Rollout]) -> list[tuple[Rollout, bool]]:
    """Return each rollout, and whether its group is lost."""
    lost_groups = {rollout.group for rollout in rollouts if rollout.failure is not None}
    return [(rollout, rollout.group in lost_groups) for rollout in rollouts]


def _all_lost(rollouts: Sequence[Rollout]) -> EngineLost | EnvironmentFailed | SimulatorError:
    first = next(rollout.failure for rollout in rollouts if rollout.failure is not None)
    detail = f"no group of the iteration is complete: rollouts failed twice; first failure: {first}"
    if first.fault is Fault.SIMULATOR:
        return SimulatorError(detail, hint="traced llm check --user")
    return (EngineLost if first.fault is Fault.ENGINE else EnvironmentFailed)(detail, hint="traced doctor")
