"""Admit: the checks of a candidate environment in its container, with the base model's rewards from the engine.

Invariants: an environment is judged once per cycle; the report with its evidence is stored whether it passes or not.
How it fails: no Docker, no image or no engine is no verdict and stops the cycle; a failure of the environment is one
(``sandbox.admission``).

What the settings say of an admission, in a cycle and of a single file alike.
"""

import json
from collections.abc import Sequence

from sandbox import admission
from sandbox.admission import Thresholds
from sandbox.admission.checks import refusals
from sandbox.contract import Tool
from sandbox.docker_engine import connect
from sandbox.episodes import EpisodeSource
from sandbox.errors import EpisodeLost
from store.repositories.environments import get_environment, list_admissions, save_admission
from store.types import AdmissionReport, EndCause, Outcome, Trajectory
from traced.config.settings import Settings
from traced.inference.errors import EngineError
from traced.pipeline.collect import collected
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, model_policy
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes


def thresholds(settings: Settings) -> Thresholds:
    """The settings' thresholds; the others keep their defaults."""
    given = settings.admission
    return Thresholds(
        seeds=given.seeds,
        spread_groups=given.base_seeds,
        spread_rollouts=given.base_rollouts,
        spread_low=given.mean_low,
        spread_high=given.mean_high,
        spread_mixed=given.mixed,
    )


ERROR_EXAMPLES = 50


async def admit(context: Context, capability: str, environment: str) -> bool:
    """Whether the environment of this hash may be trained on."""
    with context.stage("admit", f"Admit the environment for {capability}", capability) as shown:
        report = stored_report(context, environment) or await _judge(context, environment)
        refused = refusals(report)
        shown.found = {"environment": environment, "admitted": report.admitted, "refused_by": sorted(refused)}
        shown.figure = "admitted" if report.admitted else f"refused by {', '.join(refused)}"
    return report.admitted


def stored_report(context: Context, environment: str) -> AdmissionReport | None:
    """The cycle's newest report on an environment, None when there is none."""
    with context.reading() as session:
        reports = list_admissions(session, environment, cycle_id=context.cycle_id)
    return reports[-1].report if reports else None


async def _judge(context: Context, environment: str) -> AdmissionReport:
    with context.reading() as session:
        source_code = get_environment(session, environment).source_code
    trajectories = collected(context)
    report = await admission.admit(
        source_code,
        target_tools=_tools(trajectories),
        target_error_examples=error_examples(trajectories),
        base_rewards=_base_rewards(context),
        thresholds=thresholds(context.settings),
        limits=context.sandbox_limits,
        owner=context.sandbox_owner,
    )
    with context.writing() as session:
        save_admission(session, report, cycle_id=context.cycle_id, at=context.now())
    return report


def _tools(trajectories: Sequence[Trajectory]) -> list[Tool]:
    """Every tool that the target has shown, once."""
    return list({tool["function"]["name"]: tool for trajectory in trajectories for tool in trajectory.tools}.values())


def error_examples(trajectories: Sequence[Trajectory]) -> list[str]:
    """Distinct contents of tool messages that tell an error, in the order of the recordings."""
    contents = (
        str(message.get("content") or "")
        for trajectory in trajectories
        for message in trajectory.messages
        if message["role"] == "tool"
    )
    return list(dict.fromkeys(content for content in contents if _tells_error(content)))[:ERROR_EXAMPLES]


def _tells_error(content: str) -> bool:
    try:
        told = json.loads(content)
    except ValueError:
        return content.lower().startswith("error")
    return isinstance(told, dict) and "error" in told


def _base_rewards(context: Context) -> admission.BaseRewards:
    async def rewards(source: EpisodeSource, seeds: list[int], rollouts: int) -> list[list[float]]:
        """One group of the base model's rewards per seed, sampled as training samples."""
        temperature = context.settings.training.temperature
        policy = await model_policy(context, BASE, temperature)
        jobs = [EpisodeJob(seed, trial, "", str(seed)) for seed in seeds for trial in range(rollouts)]
        limits = Limits(context.settings.training.max_turns, context.settings.collect.concurrency)
        groups: dict[int, list[float]] = {seed: [] for seed in seeds}
        running = run_episodes(
            source, jobs, policy, limits, model=BASE, temperature=temperature, base_seed=context.settings.seed
        )
        async for trajectory in running:
            if trajectory.end_cause is EndCause.SANDBOX_ERROR:
                connect().close()  # Docker gone is no failure of the environment: EngineDown says so
            groups[int(trajectory.task_id)].append(_reward(trajectory))
        return list(groups.values())

    return rewards


def _reward(trajectory: Trajectory) -> float:
    """The reward of a sound episode; the machinery's failure is raised again, as the kind it was."""
    if trajectory.outcome is not Outcome.INFRASTRUCTURE:
        return trajectory.reward
    if trajectory.end_cause is EndCause.ENGINE_ERROR:
        raise EngineError(trajectory.detail, hint="run the same command again")
    raise EpisodeLost(trajectory.detail)
