"""The evaluation stage: the test split under the do-nothing floor, the base, each live adapter alone, and the router.

The live system that the cycle began with is played as well, if no earlier cycle has its episodes.

All policies play the same seeds at the evaluation temperature, and the router sees only the opening messages, as in
production. ``grpo_on_target`` trains one LoRA directly on the target with the same number of rollouts, for comparison
only: it is never published, gated or routed to.
"""

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sandbox.contract import Message, Task, Tool
from sandbox.episodes import EpisodeSource
from store.repositories.adapters import get_adapter
from store.repositories.promotions import trials
from store.repositories.serving import save_routing
from store.types import Outcome, Trajectory, opening_messages
from traced.config.settings import Settings
from traced.core.errors import StageError
from traced.evaluation.figures import FLOOR, ON_TARGET, ROUTED, TARGET_NOT_TESTED, SelfCheck, title_of
from traced.evaluation.intervals import Rate, episode_key, rate
from traced.inference.client import Completion
from traced.inference.policies import Policy
from traced.pipeline.adapter_files import check_version, serve_version
from traced.pipeline.collect import count_successes
from traced.pipeline.compose import composition_of
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, EPISODE_S, episodes, first_jobs, model_policy, trials_of, trials_text
from traced.pipeline.incumbent import composition_of_settings, incumbent_player
from traced.pipeline.mixture import sound
from traced.pipeline.promote import routable_adapters
from traced.pipeline.routers import available, composition_policy, routers, routing_choices
from traced.pipeline.self_check import SELF_CHECK, self_check
from traced.pipeline.step import TESTED, is_incumbent_untested
from traced.pipeline.train import job_for, run_summary, store_variables, with_servers, with_user
from traced.rollouts.episodes import EpisodeJob
from traced.rollouts.step_limit import step_timeout_s
from traced.routing.composition import MERGED, Composition, capability_of
from traced.routing.routers import RoutedPolicy, Router
from traced.targets.description import MODEL_USER
from traced.training.device import training_device
from traced.training.errors import NothingToLearn
from traced.training.process import train as run_job

ROUTE = "route"
EPISODES, TRAINING = "episodes", "training"  # kinds of stages
ROLLOUT_S = 0.06  # as EPISODE_S
TYPICAL_CAPABILITIES = 3  # number in a cycle, to estimate its progress before the analysis
COMPARISON = "Train on the target itself, for comparison"


@dataclass(frozen=True)
class DoNothing:
    """The floor policy: an agent that says nothing and calls no tool."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """Return an empty message."""
        return Completion({"role": "assistant", "content": ""}, [], [], [], "stop")


def expected_s(seeds: int, adapters: int) -> float:
    """Return the expected seconds of the evaluation: base, each adapter alone, and the router if there are adapters."""
    return EPISODE_S * seeds * (1 + adapters + bool(adapters))


async def evaluate(context: Context, promoted_adapters: Sequence[str]) -> None:
    """Play the test split with every policy.

    Where one adapter alone answers for all, its episodes are those of the composition too; see ``pipeline.report``. For
    a recorded target nothing is played: only the router of its traffic is fitted.
    """
    if context.target.is_recorded:
        await _without_episodes(context, promoted_adapters)
        return
    seeds, adapters = context.settings.test.seeds, routable_adapters(context, promoted_adapters)
    composition = composition_of(context, adapters) if adapters else None
    is_routed = bool(adapters) and (composition is None or bool(composition.router))
    for model in (BASE, *adapters, *([ROUTED] if is_routed else [])):
        context.progress.plan(stage_of(model), test_title(model), EPISODE_S * seeds, EPISODES)
    async with context.target_source() as source:
        await _floor_on_test(context, source)
        await _model_on_test(context, source, BASE)
        await _incumbent_on_test(context, source)
        for name in adapters:
            await serve_version(context, name)
            await _model_on_test(context, source, name)
            await check_version(context, name)
        if is_routed:
            routed = composition or composition_of_settings(adapters, context.settings)
            await _router_on_test(context, source, routed)
    if composition is not None and composition.model:
        await _publish_router_of_the_rest(context, [name for name in adapters if name != composition.model])


async def _publish_router_of_the_rest(context: Context, remaining_adapters: Sequence[str]) -> None:
    """Publish the classifier that routers need when the version that answers everything is rolled back."""
    composition = composition_of(context, remaining_adapters)
    composition = composition or composition_of_settings(remaining_adapters, context.settings)
    if composition.router and composition.routed:
        await routers(context, composition.routed, publish=True)


async def _without_episodes(context: Context, promoted_adapters: Sequence[str]) -> None:
    with context.stage("evaluate", "Fit the router of the traffic") as stage:
        # A shadow gets the conversations of its capability, too.
        with context.read_session() as session:
            on_trial = [trial.promotion.adapter for trial in trials(session, context.model.name)]
            shadows = [name for name in on_trial if get_adapter(session, name).cycle_id == context.cycle_id]
        if adapters := routable_adapters(context, list(dict.fromkeys([*promoted_adapters, *shadows]))):
            # A classifier without what an earlier cycle has on trial would decide nothing: label tokens would.
            capabilities = {MERGED, *map(capability_of, adapters)}
            adapters += [name for name in sound(context, on_trial) if capability_of(name) not in capabilities]
            serving = next(iter(await routers(context, adapters, publish=True)))
            stage.figure = f"{serving} over {', '.join(adapters)}; "
        stage.figure += TARGET_NOT_TESTED


async def evaluate_base(context: Context) -> tuple[SelfCheck, list[Rate]]:
    """Play the test split with the do-nothing floor and the base model.

    Returns:
        The target's self-check, and the success rates of both.
    """
    async with context.target_source() as source:
        check, floor = await _floor_on_test(context, source)
        base = await _model_on_test(context, source, BASE)
    return check, [rate(FLOOR, floor), rate(BASE, base)]


def stage_of(model: str) -> str:
    """Return the stage's name in the events of a policy's episodes."""
    return f"evaluate {model}"


def test_title(model: str) -> str:
    """Return the title of the stage of a policy's episodes."""
    return f"Test: {title_of(model)}"


def test_jobs(context: Context) -> list[EpisodeJob]:
    """Return jobs for the first seeds of the test split; a list of tasks is played again if it is shorter."""
    return first_jobs(context.target, "test", context.settings.test.seeds)


async def on_test(
    context: Context,
    source: EpisodeSource,
    model: str,
    policy: Policy,
    detail: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Return one policy's episodes on the test seeds; ``detail`` is stored with the end of the stage."""
    jobs = test_jobs(context)
    title = f"{test_title(model)}{trials_text(context.target, jobs)}"
    with context.stage(stage_of(model), title, total=len(jobs)) as stage:
        stage.detail = {**trials_of(context.target, jobs), **(detail or {})}
        return await episodes(
            context,
            source,
            jobs,
            policy,
            model=model,
            temperature=context.settings.engine.temperature,
            tick=count_successes(stage),
        )


async def _floor_on_test(context: Context, source: EpisodeSource) -> tuple[SelfCheck, list[Trajectory]]:
    check = await self_check(context.target, context.settings, "test")
    detail = {SELF_CHECK: dataclasses.asdict(check)}
    return check, await on_test(context, source, FLOOR, DoNothing(), detail)


async def _model_on_test(context: Context, source: EpisodeSource, model: str) -> list[Trajectory]:
    policy = await model_policy(context, model, context.settings.engine.temperature)
    return await on_test(context, source, model, policy)


async def _incumbent_on_test(context: Context, source: EpisodeSource) -> None:
    """Play the live system that the cycle began with, if no earlier cycle has its test episodes."""
    with context.read_session() as session:
        is_untested = is_incumbent_untested(session, context.cycle_id)
    if not is_untested:
        return
    try:
        player = await incumbent_player(context)
    except StageError as error:
        # What is live by now can still be tested: a version that was put in quarantine meanwhile must not prevent it.
        context.progress.note(f"what was live before this cycle is not tested: {error.message}")
        return
    policy = await player.policy(context, context.settings.engine.temperature)
    await on_test(context, source, player.name, policy)


async def _router_on_test(context: Context, source: EpisodeSource, composition: Composition) -> None:
    temperature = context.settings.engine.temperature
    routers_by_name = await routers(context, composition.routed, publish=True)
    serving = available(composition.router, routers_by_name)
    policy = await composition_policy(context, replace(composition, router=serving), routers_by_name, temperature)
    assert isinstance(policy, RoutedPolicy)
    trajectories = await on_test(context, source, ROUTED, policy, {TESTED: dataclasses.asdict(composition)})
    sound = [trajectory for trajectory in trajectories if trajectory.outcome is not Outcome.INFRASTRUCTURE]
    choices = await routing_choices(policy, sound)
    with context.write_session() as session:
        save_routing(session, choices)
    other_routers = {name: router for name, router in routers_by_name.items() if name != serving}
    await _record_other_choices(context, serving, other_routers, sound, composition.default or BASE)


async def _record_other_choices(
    context: Context,
    serving: str,
    other_routers: Mapping[str, Router],
    trajectories: Sequence[Trajectory],
    default: str,
) -> None:
    """Record in the stage's event what the routers that do not serve would have chosen; ``default`` for the base."""
    with context.stage(ROUTE, "Compare with the other router", total=len(other_routers) * len(trajectories)) as stage:
        picks: dict[str, dict[str, str]] = {}
        reasons: dict[str, dict[str, int]] = {}
        for name, router in other_routers.items():
            picks[name], reason_counts = {}, Counter[str]()
            for trajectory in trajectories:
                decision = await router.choose(Task("", opening_messages(trajectory.messages), []))
                picks[name][episode_key(trajectory)] = default if decision.model == BASE else decision.model
                reason_counts.update([decision.reason] if decision.reason else [])
                stage.advance()
            reasons[name] = dict(reason_counts)
        stage.detail = {"serving": serving, "picks": picks, "by_default": reasons}


def expected_comparison_s(settings: Settings, adapters: int) -> float:
    """Return the expected seconds of the comparison training after this number of adapters."""
    training = settings.training
    return ROLLOUT_S * adapters * training.iterations * training.groups * training.rollouts


async def grpo_on_target(context: Context, rollouts: int) -> None:
    """Train on the target itself for at least ``rollouts`` (> 0) rollouts, then play the test split.

    Sampling, validation and recoveries are those of the adapters. Validation episodes are no rollouts, as in the
    adapters' trainings; the stage's event has their number. A training that finds nothing to learn from ends the
    comparison with a note.
    """
    split = context.target.splits["train"]
    device = training_device(context.settings.devices.train_on, context.settings.training.processes, os.environ)
    job = job_for(
        context.settings,
        run_id=f"{context.cycle_id}/{ON_TARGET}",
        capability=ON_TARGET,
        source={
            "target": context.target.name,
            "split": "train",
            "table": context.settings.target.model_dump_json(),
            "data_dir": str(context.data_dir),
        },
        model=context.model.path,
        out=context.run_dir / "training" / ON_TARGET,
        device=device,
    )
    # A group is one task, and the target's own limits come before those of the settings.
    turns, step_s = context.target.description.max_turns or job.max_turns, step_timeout_s(context.target.step_s)
    groups, job = job.groups, replace(job, groups=1, seed_low=split.start, seed_high=split.stop)
    groups = min(groups, job.training_seeds)
    job = replace(job, groups=groups, max_turns=turns, step_timeout_s=step_s)
    if context.target.description.user == MODEL_USER:
        job = with_user(context, job, context.target.step_s)
    iterations = math.ceil(rollouts / (job.groups * job.rollouts))
    # Early stopping is off, because the comparison must spend the same number of rollouts as the adapters.
    job = replace(job, threads=context.settings.threads, solved_after=0)
    job = replace(job, iterations=iterations)
    job = await with_servers(context, job, device)
    with context.stage("train", COMPARISON, ON_TARGET, iterations) as stage:
        try:
            result = await run_job(
                job,
                lambda metrics: stage.reach(int(metrics["iteration"]), f"reward {metrics['reward']:.2f}"),
                device.trainer_variables | store_variables(context),
            )
        except NothingToLearn as error:
            stage.detail = {"summary": str(error)}
            context.progress.note(f"the comparison with GRPO on the target has no result: {error}")
            return
        episodes = result.iterations * job.groups * job.rollouts
        stage.detail = {"rollouts": episodes, "validation_episodes": result.validation_episodes}
        stage.detail |= {"summary": run_summary(result)}
    await context.serve(ON_TARGET, job.adapter)
    async with context.target_source() as source:
        policy = await model_policy(context, ON_TARGET, context.settings.engine.temperature)
        await on_test(context, source, ON_TARGET, policy)
