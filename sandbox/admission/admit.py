"""Admit a synthetic environment, or say by name why not.

Every check runs in containers and leaves a named result with evidence and seconds. The source must load and run on two
seeds before the rest is tried; where it does not, or a check ends in a deadline or a dead worker, the report holds the
checks made so far and refuses. EngineDown and ImageMissing are no verdict on the environment and are raised. A worker
that was killed, but not for its memory, may have been killed from outside, and so may one that a base model's episode
lost: the checks are made once more, and an environment that ends itself is refused then. From cheap to dear in order;
the base model's rewards come last, asked for only when everything else has passed.

Not covered: whether training on the environment helps (the gate's question).
"""

import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from sandbox.admission import checks
from sandbox.admission.bench import Bench
from sandbox.admission.checks import BaseRewards, fault_evidence
from sandbox.admission.interface import interface
from sandbox.admission.static import inspect_source
from sandbox.admission.thresholds import Thresholds
from sandbox.client import SandboxSource
from sandbox.contract import Tool
from sandbox.errors import EngineDown, EpisodeLost, ImageMissing, SandboxError, WorkerDied
from sandbox.hashing import environment_hash
from sandbox.policy import SandboxLimits
from store.types import AdmissionReport, Check

TWIN_HASH_SEED = 4242
KILLED = 128 + signal.SIGKILL
PLAYED: dict[str, Callable[[Bench], Awaitable[checks.Verdict]]] = {
    "determinism": checks.determinism,
    "oracle": checks.oracle,
    "diversity": checks.diversity,
    "floor": checks.floor,
    "exploits": checks.exploits,
    "interface": interface,
    "leak": checks.leak,
    "latency": checks.latency,
    "effects": checks.effects,
}
NAMES = ("source", "runs", *PLAYED, "spread")  # all names, in the order in which they are made


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
    begins: Callable[[str], None] = lambda name: None,
) -> AdmissionReport:
    """Run every check on ``source_code``; admitted when all passed. Raises EngineDown or ImageMissing.

    ``target_tools`` are the target's OpenAI schemas; with None nothing is compared with a target, and the evidence of
    "interface" says so. ``target_error_examples`` are contents of its tool messages that tell an error.
    ``base_rewards(source, seeds, k)`` answers the base model's rewards, one group of k per seed; with None the check
    "spread" is left out and its evidence says so (``left_out``). ``limits`` are the container's; a call gets
    the thresholds' seconds where those are fewer. ``begins`` hears each check's name as it begins.
    """
    thresholds = thresholds or Thresholds()
    sources = _Sources(source_code, owner, limits or SandboxLimits(), target_tools, target_error_examples)
    made = await _checks(sources, base_rewards, thresholds, clock, begins)
    if any(check.evidence.get("killed") for check in made):
        made = await _checks(sources, base_rewards, thresholds, clock, begins)
    return AdmissionReport(environment_hash(source_code), all(check.passed for check in made), made)


@dataclass(frozen=True)
class _Sources:
    source_code: str
    owner: str
    limits: SandboxLimits
    target_tools: list[Tool] | None
    target_error_examples: list[str]

    def bench(self, thresholds: Thresholds) -> Bench:
        """Two sandboxes of the environment, which differ in the hash seed of their interpreters."""
        limits = replace(self.limits, call_seconds=min(thresholds.call_seconds, self.limits.call_seconds), restarts=0)
        source, twin = (
            SandboxSource(self.source_code, limits=limits, owner=self.owner, hash_seed=seed)
            for seed in (0, TWIN_HASH_SEED)
        )
        return Bench(source, twin, thresholds, self.target_tools, self.target_error_examples)


async def _checks(
    given: _Sources,
    base_rewards: BaseRewards | None,
    thresholds: Thresholds,
    clock: Callable[[], float],
    begins: Callable[[str], None],
) -> list[Check]:
    report: list[Check] = []

    async def judge(name: str, check: Awaitable[checks.Verdict]) -> bool:
        begins(name)
        report.append(await _judged(name, check, clock))
        return report[-1].passed

    await judge("source", _at_once(inspect_source(given.source_code)))
    bench = given.bench(thresholds)
    async with AsyncExitStack() as stack:
        if await judge("runs", _start_and_run(stack, bench)):
            for name, check in PLAYED.items():
                if not await judge(name, check(bench)) and _stuck(report[-1]):
                    break
            if all(check.passed for check in report):
                await judge("spread", checks.spread(bench, base_rewards))
    return report


async def _judged(name: str, check: Awaitable[checks.Verdict], clock: Callable[[], float]) -> Check:
    """The one border where a failure of the environment becomes a failed check."""
    begin = clock()
    try:
        passed, evidence = await check
    except (EngineDown, ImageMissing):
        raise
    except SandboxError as error:
        passed, evidence = False, fault_evidence(error)
        if isinstance(error, EpisodeLost) or (
            isinstance(error, WorkerDied) and error.exit_code == KILLED and not error.oom
        ):
            evidence["killed"] = True
    return Check(name, passed, evidence, round(clock() - begin, 3))


async def _at_once(verdict: checks.Verdict) -> checks.Verdict:
    return verdict


async def _start_and_run(stack: AsyncExitStack, bench: Bench) -> checks.Verdict:
    await stack.enter_async_context(bench.source)
    await stack.enter_async_context(bench.twin)
    return await checks.runs(bench)


def _stuck(check: Check) -> bool:
    """A check that ended otherwise than by the environment's own exception: what follows would only wait again."""
    return check.evidence.get("fault") in {"Deadline", "WorkerDied", "ProtocolFault"}


def refusals(report: AdmissionReport) -> dict[str, dict[str, Any]]:
    """The failed checks and their evidence."""
    return {check.name: check.evidence for check in report.checks if not check.passed}
