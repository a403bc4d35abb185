"""Admit a synthetic environment, or say by name why not.

Every check runs in containers and leaves a named result with evidence and seconds. The source must load and run on two
seeds before the rest is tried; where it does not, or a check ends in a deadline or a dead worker, the report holds the
checks made so far and refuses. EngineDown and ImageMissing are no verdict on the environment and are raised. A worker
that was killed, but not for its memory, may have been killed from outside, and so may one that a base model's episode
lost: the checks are made once more, and an environment that ends itself is refused then. Checks that share no
container run at once; the report keeps its order, and ends with the first check that got stuck. The base model's
rewards come last, asked for only when everything else has passed.

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

HASH_SEEDS = (4242, TRAINING_HASH_SEED)  # of source and twin: what wants reward is played as training will be
SIGKILL_EXIT_CODE = 128 + signal.SIGKILL
CHECK_NAMES = (  # all names, in the order in which they are told
    *("source", "runs", "determinism", "oracle", "diversity", "floor"),
    *("exploits", "slips", "interface", "leak", "latency", "effects", "spread"),
)
CheckFunction = Callable[[CheckContext], Awaitable[Verdict]]
STAGES: tuple[
    tuple[dict[str, CheckFunction], ...], ...
] = (  # the lanes of a stage run at once, each in its own container
    ({"determinism": determinism},),  # both containers
    (
        {"oracle": oracle, "diversity": diversity, "interface": interface, "leak": leak, "slips": oracle_mutations},
        {"floor": floor, "exploits": exploits},  # the twin's
    ),
    ({"latency": latency, "effects": effects},),  # in a quiet moment, and of all that was played
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
    """Run every check on ``source_code``; admitted when all passed. Raises EngineDown or ImageMissing.

    ``target_tools`` are the target's OpenAI schemas; with None nothing is compared with a target, and the evidence of
    "interface" says so. ``target_error_examples`` are contents of its tool messages that tell an error.
    ``base_rewards(source, seeds, k)`` answers the base model's rewards, one group of k per seed; with None the check
    "spread" is left out and its evidence says so (``left_out``). ``limits`` are the container's, as training
    will have them. ``begins`` hears each check's name as it begins.
    """
    thresholds = thresholds or Thresholds()
    candidate = _Candidate(source_code, owner, limits or SandboxLimits(), target_tools, target_error_examples)
    checks = await _run_checks(candidate, base_rewards, thresholds, clock, on_check_start)
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
        """Two sandboxes of the environment, which differ in the hash seed of their interpreters.

        Both are started and asked as in training, to the last word of the worker's command line and the last second
        of a call: by nothing that it is given can an environment tell that it is judged.
        """
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
    """The report in the order of ``NAMES``, up to the first check that got stuck."""
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
                await run_check("spread", spread(context, base_rewards))
    report.sort(key=lambda check: CHECK_NAMES.index(check.name))
    stuck_at = next((index for index, check in enumerate(report) if _is_stuck(check)), len(report))
    return report[: stuck_at + 1]


async def _timed_check(name: str, verdict: Awaitable[Verdict], clock: Callable[[], float]) -> Check:
    """The one border where a failure of the environment becomes a failed check."""
    start_time = clock()
    try:
        passed, evidence = await verdict
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
    """A check that ended otherwise than by the environment's own exception: what follows would only wait again."""
    return check.evidence.get("fault") in {"Deadline", "WorkerDied", "ProtocolFault"}


def refusals(report: AdmissionReport) -> dict[str, dict[str, Any]]:
    """The failed checks and their evidence."""
    return {check.name: check.evidence for check in report.checks if not check.passed}
