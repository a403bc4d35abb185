"""Compare: GRPO directly on the target's train split with as many rollouts as all adapters together, one LoRA.

Invariants: the same hyper-parameters as the adapters' trainings; evaluated on the same test seeds as the router; the
adapter is for comparison only, so it is never published, gated or routed to.
"""

import dataclasses
import math

from traced.config import Settings
from traced.figures import ON_TARGET
from traced.stages.context import Context
from traced.stages.episodes import model_policy
from traced.stages.evaluate import on_test
from traced.stages.train import job_for
from traced.training.supervise import train as run_job

COMPARISON = "Train on the target itself, to compare"
ROLLOUT_S = 0.06


def expected_s(settings: Settings, adapters: int) -> float:
    """Seconds that it takes here after so many adapters."""
    training = settings.training
    return ROLLOUT_S * adapters * training.iterations * training.groups * training.rollouts


async def grpo_on_target(context: Context, rollouts: int) -> None:
    """Train on the target itself for at least ``rollouts`` (> 0) rollouts, then play the test split."""
    split = context.target.splits["train"]
    job = job_for(
        context.settings,
        run_id=f"{context.cycle_id}/{ON_TARGET}",
        capability=ON_TARGET,
        source={"target": context.target.name, "split": "train"},
        model=context.model.path,
        out=context.run_dir / "training" / ON_TARGET,
    )
    iterations = math.ceil(rollouts / (job.groups * job.rollouts))
    job = dataclasses.replace(job, threads=context.settings.threads, solved_after=0)
    job = dataclasses.replace(job, iterations=iterations, seed_low=split.start, seed_high=split.stop)
    with context.stage("train", COMPARISON, ON_TARGET, iterations) as shown:
        await run_job(job, lambda metrics: shown.reach(int(metrics["iteration"]), f"reward {metrics['reward']:.2f}"))
    await context.serve(ON_TARGET, job.adapter)
    async with context.target.source() as source:
        policy = await model_policy(context, ON_TARGET, context.settings.engine.temperature)
        await on_test(context, source, ON_TARGET, policy, "Test: GRPO on the target itself")
