"""Run every admission check on a synthetic environment and report the verdict of each.

The checks run in containers; those that share no container run concurrently. The report has the order of
``CHECK_NAMES``. If the source does not load and run, or a check ends in a deadline, a dead worker or a protocol fault,
the report ends with that check and refuses the environment. EngineDown and ImageMissing are no verdict on the
environment and are raised.

Not covered: whether training on the environment helps, which the gate measures.
"""

import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from sandbox.admission.context import CheckContext, EpisodeBudget, Thresholds, Verdict, fault_evidence, gather_all
from sandbox.admission.diversity import diversity
from sandbox.admission.execution import determinism, effects, latency, runs
from sandbox.admission.interface import interface
from sandbox.admission.leak import leak
from sandbox.admission.oracle_mutations import oracle_mutations
from sandbox.admission.shortcuts import exploits, floor
from sandbox.admission.solvability import BaseRewards, oracle, spread
from sandbox.admission.static_analysis import inspect_source
from sandbox.admission.target_texts import TargetTexts
from sandbox.admission.world import WorldReplay, omitted_tools, world, world_of
from sandbox.client import SandboxSource
from sandbox.contract import Tool
from sandbox.errors import EngineDown, EpisodeLost, ImageMissing, SandboxError, WorkerDied
from sandbox.hashing import environment_hash
from sandbox.policy import TRAINING_HASH_SEED, SandboxLimits
from sandbox.user import GoalUser, asks_for_model
from store.types import AdmissionReport, Check

# Hash seeds of source and replica. The floor and exploit policies play in the replica, under training's hash seed.
HASH_SEEDS = (4242, TRAINING_HASH_SEED)
SIGKILL_EXIT_CODE = 128 + signal.SIGKILL
# Names of the checks in the order of the report.
CHECK_NAMES = (
    *("source", "world", "runs", "determinism", "oracle", "diversity", "floor"),
    *("exploits", "slips", "interface", "leak", "latency", "effects", "spread"),
)
CheckFunction = Callable[[CheckContext], Awaitable[Verdict]]
# Stages run one after another. The lanes of a stage run concurrently, each in its own container.
STAGES: tuple[tuple[dict[str, CheckFunction], ...], ...] = (
    # Determinism uses both containers, so no other check may run.
    ({"determinism": determinism},),
    (
        {"oracle": oracle, "diversity": diversity, "interface": interface, "leak": leak, "slips": oracle_mutations},
        # These play in the replica.
        {"floor": floor, "exploits": exploits},
    ),
    # Latency needs an idle machine, and the check of effects covers everything that was played before it.
    ({"latency": latency, "effects": effects},),
)


async def admit(
    source_code: str,
    *,
    target_tools: list[Tool] | None,
    target_error_examples: list[str],
    base_rewards: BaseRewards | None,
    target_texts: TargetTexts | None = None,
    thresholds: Thresholds | None = None,
    limits: SandboxLimits | None = None,
    owner: str = "traced",
    has_user_model: bool = True,
    world_replay: WorldReplay | None = None,
    budget: EpisodeBudget | None = None,
    clock: Callable[[], float] = time.perf_counter,
    on_check_start: Callable[[str], None] = lambda name: None,
) -> AdmissionReport:
    """Run every check on ``source_code``; it is admitted if all pass. Raises EngineDown or ImageMissing.

    Args:
        target_tools: the target's OpenAI schemas; with None the check "interface" compares with no target, and its
            evidence says so.
        target_error_examples: contents of the target's tool messages that report an error.
        target_texts: system prompts and answers of the target's conversations; None: they are not compared.
        base_rewards: ``base_rewards(source, seeds, k)`` returns the base model's rewards, a group of k per seed; with
            None the check "spread" is left out, and "left_out" in its evidence gives the reason.
        limits: the containers' limits, the same as in training.
        owner: the label by which ``docker_engine.reap_orphans`` later recognizes the containers.
        has_user_model: whether the environment may ask for a user that is a model. Its place is taken by a
            ``GoalUser``; ``base_rewards`` may set the model as ``source.user``.
        world_replay: the target's world and its agreement with recorded calls; the check "world" is made of an
            environment that stands on a world, if this is given.
        budget: the turns and tokens of the training's episodes; with None the oracle may take any number.
        on_check_start: called with each check's name when the check starts.
    """
    thresholds = thresholds or Thresholds()
    candidate = _Candidate(
        source_code,
        owner,
        limits or SandboxLimits(),
        target_tools,
        target_error_examples,
        target_texts or TargetTexts(),
        has_user_model,
        world_replay,
        budget,
    )
    checks = await _run_checks(candidate, base_rewards, thresholds, clock, on_check_start)
    # A worker that was killed, but not for lack of memory, may have been killed from outside, so the checks run once
    # more. An environment that kills its own process is refused by the second run.
    if any(check.evidence.get("killed") for check in checks):
        checks = await _run_checks(candidate, base_rewards, thresholds, clock, on_check_start)
    return AdmissionReport(environment_hash(source_code), all(check.passed for check in checks), checks)


@dataclass(frozen=True)
class _Candidate:
    source_code: str
    owner: str
    limits: SandboxLimits
    target_tools: list[Tool] | None
    target_error_examples: list[str]
    target_texts: TargetTexts
    has_user_model: bool
    world_replay: WorldReplay | None
    budget: EpisodeBudget | None

    def check_context(self, thresholds: Thresholds) -> CheckContext:
        """Return a context with two sandboxes of the environment, which have different hash seeds."""
        # Command line and budgets are exactly those of training: an environment must not be able to detect admission.
        # Only ``restarts`` differs, which it cannot observe.
        limits = replace(self.limits, restarts=0)
        user = GoalUser() if asks_for_model(self.source_code) else None
        source, replica = (
            SandboxSource(self.source_code, limits=limits, owner=self.owner, hash_seed=seed, user=user)
            for seed in HASH_SEEDS
        )
        return CheckContext(
            source,
            replica,
            thresholds,
            self.target_tools,
            self.target_error_examples,
            self.target_texts,
            self.budget,
        )


async def _run_checks(
    candidate: _Candidate,
    base_rewards: BaseRewards | None,
    thresholds: Thresholds,
    clock: Callable[[], float],
    on_check_start: Callable[[str], None],
) -> list[Check]:
    report: list[Check] = []

    async def run_check(name: str, verdict: Awaitable[Verdict]) -> bool:
        on_check_start(name)
        check = await _timed_check(name, verdict, clock)
        report.append(check)
        return check.passed or not _is_stuck(check)

    async def run_lane(checks: dict[str, CheckFunction]) -> None:
        for name, check in checks.items():
            if not await run_check(name, check(context)):
                break

    inspection = inspect_source(candidate.source_code, has_user_model=candidate.has_user_model)
    await run_check("source", _completed(inspection))
    digest = world_of(candidate.source_code)
    if digest is not None and candidate.world_replay is not None:
        tools = {tool["function"]["name"] for tool in candidate.target_tools or []}
        omitted = omitted_tools(candidate.source_code)
        await run_check("world", _completed(world(digest, omitted, candidate.world_replay, tools, thresholds)))
    context = candidate.check_context(thresholds)
    async with AsyncExitStack() as stack:
        await run_check("runs", _start_both(stack, context))
        if report[-1].passed:
            for lanes in STAGES:
                await gather_all(run_lane(checks) for checks in lanes)
                if any(map(_is_stuck, report)):
                    break
            if all(check.passed for check in report):
                # The base model plays last, and only if every other check has passed.
                await run_check("spread", spread(context, base_rewards))
    report.sort(key=lambda check: CHECK_NAMES.index(check.name))
    stuck_at = next((index for index, check in enumerate(report) if _is_stuck(check)), len(report))
    return report[: stuck_at + 1]


async def _timed_check(name: str, verdict: Awaitable[Verdict], clock: Callable[[], float]) -> Check:
    start_time = clock()
    try:
        passed, evidence = await verdict
    # The only place where a failure of the environment becomes a failed check; failures of the machine are raised.
    except (EngineDown, ImageMissing):
        raise
    except SandboxError as error:
        passed, evidence = False, fault_evidence(error)
        if isinstance(error, EpisodeLost) or (
            isinstance(error, WorkerDied) and error.exit_code == SIGKILL_EXIT_CODE and not error.oom
        ):
            evidence["killed"] = True
    return Check(name, passed, evidence, round(clock() - start_time, 3))


async def _completed(verdict: Verdict) -> Verdict:
    return verdict


async def _start_both(stack: AsyncExitStack, context: CheckContext) -> Verdict:
    await gather_all(stack.enter_async_context(source) for source in (context.source, context.replica))
    return await runs(context)


def _is_stuck(check: Check) -> bool:
    # After one of these faults, the next checks would only run into it again. After an EnvironmentFault, they run.
    return check.evidence.get("fault") in {"Deadline", "WorkerDied", "ProtocolFault"}


def refusals(report: AdmissionReport) -> dict[str, dict[str, Any]]:
    """Return the evidence of the failed checks by name."""
    return {check.name: check.evidence for check in report.checks if not check.passed}
