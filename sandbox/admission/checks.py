"""Run every admission check on a synthetic environment and report the verdict of each.

The checks run in containers; those that share no container run at once, and the report keeps the order of
``CHECK_NAMES``. If the source does not load and run, or a check ends in a deadline or a dead worker, the report ends
there and refuses. EngineDown and ImageMissing are no verdict on the environment and are raised.

Not covered: whether training on the environment helps (the gate's question).
"""

import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from sandbox.admission.context import CheckContext, Thresholds, Verdict, fault_evidence, gather_all
from sandbox.admission.diversity import diversity
from sandbox.admission.execution import determinism, effects, latency, runs
from sandbox.admission.interface import interface
from sandbox.admission.leak import leak
from sandbox.admission.oracle_mutations import oracle_mutations
from sandbox.admission.shortcuts import exploits, floor
from sandbox.admission.solvability import BaseRewards, oracle, spread
from sandbox.admission.static_analysis import inspect_source
from sandbox.client import SandboxSource
from sandbox.contract import Tool
from sandbox.errors import EngineDown, EpisodeLost, ImageMissing, SandboxError, WorkerDied
from sandbox.hashing import environment_hash
from sandbox.policy import TRAINING_HASH_SEED, SandboxLimits
from store.types import AdmissionReport, Check

# Of source and replica: policies that want reward play in the replica, under the hash seed of training.
HASH_SEEDS = (4242, TRAINING_HASH_SEED)
SIGKILL_EXIT_CODE = 128 + signal.SIGKILL
# In the order of the report.
CHECK_NAMES = (
    *("source", "runs", "determinism", "oracle", "diversity", "floor"),
    *("exploits", "slips", "interface", "leak", "latency", "effects", "spread"),
)
CheckFunction = Callable[[CheckContext], Awaitable[Verdict]]
# The lanes of a stage run at once, each in its own container.
STAGES: tuple[tuple[dict[str, CheckFunction], ...], ...] = (
    # It uses both containers, so nothing else may run.
    ({"determinism": determinism},),
    (
        {"oracle": oracle, "diversity": diversity, "interface": interface, "leak": leak, "slips": oracle_mutations},
        # In the replica.
        {"floor": floor, "exploits": exploits},
    ),
    # Latency needs a quiet machine, and the effects are those of everything played before.
    ({"latency": latency, "effects": effects},),
)


async def admit(
    source_code: str,
    *,
    target_tools: list[Tool] | None,
    target_error_examples: list[str],
    base_rewards: BaseRewards | None,
    thresholds: Thresholds | None = None,
    limits: SandboxLimits | None = None,
    owner: str = "traced",
    clock: Callable[[], float] = time.perf_counter,
    on_check_start: Callable[[str], None] = lambda name: None,
) -> AdmissionReport:
    """Run every check on ``source_code``; it is admitted if all pass. Raises EngineDown or ImageMissing.

    Args:
        target_tools: the target's OpenAI schemas; with None the check "interface" compares with no target and says so.
        target_error_examples: contents of the target's tool messages that report an error.
        base_rewards: ``base_rewards(source, seeds, k)`` returns the base model's rewards, a group of k per seed; with
            None the check "spread" is left out and its evidence says so (``left_out``).
        limits: the container's, as in training.
        on_check_start: called with each check's name as it begins.
    """
    thresholds = thresholds or Thresholds()
    candidate = _Candidate(source_code, owner, limits or SandboxLimits(), target_tools, target_error_examples)
    checks = await _run_checks(candidate, base_rewards, thresholds, clock, on_check_start)
    # A worker that was killed, but not for its memory, may have been killed from outside: try once more. An environment
    # that ends itself is refused then.
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

    def check_context(self, thresholds: Thresholds) -> CheckContext:
        """Two sandboxes of the environment, with different hash seeds."""
        # Command line and budgets are those of training to the last word: an environment must not be able to tell that
        # it is judged. Only the restarts differ, which it cannot observe.
        limits = replace(self.limits, restarts=0)
        source, replica = (
            SandboxSource(self.source_code, limits=limits, owner=self.owner, hash_seed=seed) for seed in HASH_SEEDS
        )
        return CheckContext(source, replica, thresholds, self.target_tools, self.target_error_examples)


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

    await run_check("source", _completed(inspect_source(candidate.source_code)))
    context = candidate.check_context(thresholds)
    async with AsyncExitStack() as stack:
        await run_check("runs", _start_both(stack, context))
        if report[-1].passed:
            for lanes in STAGES:
                await gather_all(run_lane(checks) for checks in lanes)
                if any(map(_is_stuck, report)):
                    break
            if all(check.passed for check in report):
                # The base model plays last: it is asked only when everything else has passed.
                await run_check("spread", spread(context, base_rewards))
    report.sort(key=lambda check: CHECK_NAMES.index(check.name))
    stuck_at = next((index for index, check in enumerate(report) if _is_stuck(check)), len(report))
    return report[: stuck_at + 1]


async def _timed_check(name: str, verdict: Awaitable[Verdict], clock: Callable[[], float]) -> Check:
    start_time = clock()
    try:
        passed, evidence = await verdict
    # The only place where a failure of the environment becomes a failed check; the machine's failures are raised.
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
    # Only a fault raised by the environment itself lets the next checks run: after these they would just wait again.
    return check.evidence.get("fault") in {"Deadline", "WorkerDied", "ProtocolFault"}


def refusals(report: AdmissionReport) -> dict[str, dict[str, Any]]:
    """The evidence of the failed checks, by name."""
    return {check.name: check.evidence for check in report.checks if not check.passed}
