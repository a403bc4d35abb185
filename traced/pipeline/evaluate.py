"""Evaluate: the untouched test split under the floor policy, the base, each live adapter alone, and the router.

The router is measured as it will serve: over the cycle's promoted adapters and those of other cycles that are live
beside them, of the same base model (``promote.offered``, fixed at the promotion).

Invariants: all policies play the same seeds at the evaluation temperature; the router sees what production would show
it (the opening messages) and its choices are stored with their log-probs. ``routing.router`` says which router serves;
what the other one would have chosen goes into the event of stage ``ROUTE``. Called again it runs what is missing.

Compare: GRPO directly on the target's train split with as many rollouts as all adapters together, one LoRA.

Invariants: the same hyper-parameters as the adapters' trainings; evaluated on the same test seeds as the router; the
adapter is for comparison only, so it is never published, gated or routed to.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox.contract import Message, Task, Tool
from sandbox.episodes import EpisodeSource
from store.records import RoutingChoice
from store.repositories.serving import save_routing
from store.types import Outcome, Trajectory, opening_messages
from traced.config.settings import Settings
from traced.evaluation.figures import FLOOR, ON_TARGET, ROUTED
from traced.inference.client import Completion, Policy
from traced.pipeline.collect import success_so_far
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, episodes, model_policy, split_jobs
from traced.pipeline.promote import offered
from traced.pipeline.routers import routers
from traced.pipeline.train import adapter_path, job_for
from traced.rollouts.episodes import EpisodeJob
from traced.routing.routers import RoutedPolicy, Router
from traced.training.process import train as run_job

ROUTE = "route"
EPISODE_S = 0.08


@dataclass(frozen=True)
class DoNothing:
    """The floor: an agent that says nothing and calls nothing."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """An empty message."""
        return Completion({"role": "assistant", "content": ""}, [], [], [], "stop")


def expected_s(seeds: int, adapters: int) -> float:
    """Seconds that it takes here: the base, each adapter alone, and the router where there is one."""
    return EPISODE_S * seeds * (1 + adapters + bool(adapters))


async def evaluate(context: Context, promoted: Sequence[str]) -> None:
    """Play the test split with every policy; with no promoted adapter there is nothing new to route to."""
    seeds, adapters = context.settings.test.seeds, offered(context, promoted)
    for model in (BASE, *adapters, *([ROUTED] if adapters else [])):
        context.progress.plan(_stage(model), f"Test: {model}", EPISODE_S * seeds)
    async with context.target.source() as source:
        await on_test(context, source, FLOOR, DoNothing(), "Test: do nothing")
        await _model_on_test(context, source, BASE, "Test: base model")
        for name in adapters:
            await context.serve(name, adapter_path(context, name))
            await _model_on_test(context, source, name, f"Test: {name} alone")
        if adapters:
            await _routed(context, source, adapters)


def _stage(model: str) -> str:
    return f"evaluate {model}"


def test_jobs(context: Context) -> list[EpisodeJob]:
    """The first seeds of the test split."""
    return split_jobs("test", context.target.splits["test"][: context.settings.test.seeds])


async def on_test(context: Context, source: EpisodeSource, model: str, policy: Policy, title: str) -> list[Trajectory]:
    """One policy's episodes on the test seeds."""
    jobs = test_jobs(context)
    with context.stage(_stage(model), title, total=len(jobs)) as shown:
        return await episodes(
            context,
            source,
            jobs,
            policy,
            model=model,
            temperature=context.settings.engine.temperature,
            tick=success_so_far(shown),
        )


async def _model_on_test(context: Context, source: EpisodeSource, model: str, title: str) -> None:
    policy = await model_policy(context, model, context.settings.engine.temperature)
    await on_test(context, source, model, policy, title)


async def _routed(context: Context, source: EpisodeSource, adapters: Sequence[str]) -> None:
    settings = context.settings.engine
    built = await routers(context, adapters)
    serving = context.settings.routing.router
    policy = RoutedPolicy(
        await context.engine(), built[serving], temperature=settings.temperature, max_tokens=settings.max_tokens
    )
    played = await on_test(context, source, ROUTED, policy, "Test: routed")
    sound = [trajectory for trajectory in played if trajectory.outcome is not Outcome.INFRASTRUCTURE]
    choices = []
    for trajectory in sound:
        decision = await policy.route(trajectory.messages)
        choices.append(RoutingChoice(trajectory.id, decision.model, decision.logprobs, decision.seconds))
    with context.writing() as session:
        save_routing(session, choices)
    others = {name: router for name, router in built.items() if name != serving}
    await _ask(context, serving, others, sound)


async def _ask(context: Context, serving: str, others: Mapping[str, Router], played: Sequence[Trajectory]) -> None:
    """What the routers that did not serve would have chosen on the same openings, kept in the stage's event."""
    with context.stage(ROUTE, "Ask the other router", total=len(others) * len(played)) as shown:
        picks: dict[str, dict[str, str]] = {}
        reasons: dict[str, dict[str, int]] = {}
        for name, router in others.items():
            picks[name], whys = {}, Counter[str]()
            for trajectory in played:
                decision = await router.choose(Task("", opening_messages(trajectory.messages), []))
                picks[name][trajectory.task_id] = decision.model
                whys.update([decision.why] if decision.why else [])
                shown.advance()
            reasons[name] = dict(whys)
        shown.found = {"serving": serving, "picks": picks, "by_default": reasons}


COMPARISON = "Train on the target itself, to compare"
ROLLOUT_S = 0.06


def expected_comparison_s(settings: Settings, adapters: int) -> float:
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
