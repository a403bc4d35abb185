"""The admission stage: check a candidate environment in its container, with the base model's rewards from the engine.

Each environment is judged once per cycle, and the report is stored whatever the verdict.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile

from agents.synthesizer.builtin import WorldData
from agents.transcript import message_text, transcript
from agents.world.reconstruction import read_data, without_tools
from sandbox import admission
from sandbox.admission import Thresholds
from sandbox.admission.checks import refusals
from sandbox.admission.context import EpisodeBudget, PlayTokens
from sandbox.admission.target_texts import TargetTexts, tool_answers
from sandbox.admission.world import WorldReplay, world_of
from sandbox.client import SandboxSource
from sandbox.contract import Message, Task, Tool
from sandbox.docker_engine import connect
from sandbox.errors import EnvironmentFault, EpisodeLost, SandboxError
from sandbox.user import User
from store.repositories.environments import get_environment, list_admissions, save_admission
from store.types import AdmissionReport, EndCause, Outcome, Trajectory
from traced.config.settings import Settings
from traced.core.errors import CapabilityError, StageError
from traced.evaluation.world_agreement import WorldFigures
from traced.evaluation.world_bounds import tool_replay
from traced.inference.errors import EngineError
from traced.pipeline.collect import collected
from traced.pipeline.context import Context
from traced.pipeline.episodes import BASE, model_policy
from traced.pipeline.inheritance import is_inherited, solved_by_base
from traced.pipeline.world import make_world, prove_world
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes
from traced.rollouts.step_limit import step_timeout_s, user_wait_s

ERROR_EXAMPLES = 50
ANSWER_EXAMPLES = 200


def thresholds(settings: Settings) -> Thresholds:
    """Return the admission thresholds of the settings; unset ones keep their defaults."""
    section = settings.admission
    return Thresholds(
        seeds=section.seeds,
        spread_groups=section.base_seeds,
        spread_rollouts=section.base_rollouts,
        spread_low=section.mean_low,
        spread_high=section.mean_high,
        spread_mixed=section.mixed,
    )


@dataclass(frozen=True)
class EpisodeLimits:
    """What an episode of the training has at most: assistant messages, tokens in all, tokens of one message."""

    turns: int
    tokens: int
    message_tokens: int


def episode_limits(settings: Settings) -> EpisodeLimits:
    """Return the limits of the training's episodes; a conversation must fit the engine as well."""
    tokens = min(settings.training.max_length, settings.engine.max_length)
    return EpisodeLimits(settings.training.max_turns, tokens, settings.engine.max_tokens)


def _episode_budget(context: Context) -> EpisodeBudget:
    """Return the limits with a function that counts the tokens of an episode by the model's chat template."""
    # Imported here because it loads transformers.
    from jinja2 import TemplateError

    from traced.inference.chat_format import load_chat_format

    chat_format = load_chat_format(context.model.path)

    def count(task: Task, messages: list[Message]) -> PlayTokens | None:
        chat = [{"role": "system", "content": task.system}, *task.messages, *messages]
        indices = [index for index, message in enumerate(chat) if message.get("role") == "assistant"]
        try:
            lengths = {index: len(chat_format.render(chat[:index], task.tools)) for index in (*indices, len(chat))}
            answers = [len(chat_format.render(chat[: index + 1], task.tools)) - lengths[index] for index in indices]
        # What a template cannot render raises one of these; the other checks judge such an episode.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
            return None
        return PlayTokens(lengths[len(chat)], max(answers, default=0))

    limits = episode_limits(context.settings)
    return EpisodeBudget(limits.turns, limits.tokens, limits.message_tokens, count)


async def admit(context: Context, capability: str, environment: str) -> bool:
    """Return whether the environment with this hash is admitted for training."""
    with context.stage("admit", f"Admit the environment for {capability}", capability) as stage:
        report = stored_report(context, environment) or await _judge(context, environment)
        failed_checks = refusals(report)
        stage.detail = {"environment": environment, "admitted": report.admitted, "refused_by": sorted(failed_checks)}
        stage.figure = "admitted" if report.admitted else f"refused by {', '.join(failed_checks)}"
    if is_inherited(context, environment) and (reason := solved_by_base(report, context.model.name)):
        raise CapabilityError(reason)
    return report.admitted


def stored_report(context: Context, environment: str) -> AdmissionReport | None:
    """Return the cycle's newest admission report on an environment, or None."""
    with context.read_session() as session:
        reports = list_admissions(session, environment, cycle_id=context.cycle_id)
    return reports[-1].report if reports else None


async def _judge(context: Context, environment: str) -> AdmissionReport:
    with context.read_session() as session:
        source_code = get_environment(session, environment).source_code
    trajectories = collected(context)
    has_user_model = bool(context.settings.target.user.model)
    stands_on_world = context.target.is_recorded and world_of(source_code) is not None
    world_replay = admission_world(await prove_world(context)) if stands_on_world else None
    async with context.environment_user(source_code) if has_user_model else nullcontext() as user:
        report = await admission.admit(
            source_code,
            target_tools=_tools(trajectories),
            target_error_examples=error_examples(trajectories),
            target_texts=target_texts(trajectories) if context.target.is_recorded else None,
            base_rewards=_base_rewards(context, user),
            thresholds=thresholds(context.settings),
            limits=context.sandbox_limits,
            owner=context.sandbox_owner,
            has_user_model=has_user_model,
            world_replay=world_replay,
            budget=await asyncio.to_thread(_episode_budget, context),
        )
    with context.write_session() as session:
        save_admission(session, report, cycle_id=context.cycle_id, at=context.now())
    return report


async def usable_world(context: Context) -> WorldData | None:
    """Return the world that environments stand on, without the tools that held-out calls refute.

    It is replayed before it is used, so that no environment is written for tools that admission then refuses. Without
    Docker it is returned as it was made; admission needs Docker and replays it.

    None for a target that can be played, and for one whose tools answer nothing: environments then answer by their
    scenarios alone.
    """
    if not context.target.is_recorded:
        return None
    try:
        target_world = await make_world(context)
        figures = await prove_world(context)
    except StageError:
        return None
    except SandboxError:
        figures = None
    data = read_data(target_world.source_code)
    if figures is not None:
        data = without_tools(data, [item.tool for item in figures.omitted])
    return WorldData(target_world.digest, data, target_world.module)


def admission_world(figures: WorldFigures) -> WorldReplay:
    """Return what admission judges a world by."""
    rows = [tool_replay(row, split) for split, rows in figures.agreement.items() for row in rows]
    function_tools = [proof.text for proof in figures.function_proofs.values()]
    return WorldReplay(figures.digest, rows, [item.text for item in figures.omitted], function_tools)


def _tools(trajectories: Sequence[Trajectory]) -> list[Tool]:
    return list({tool["function"]["name"]: tool for trajectory in trajectories for tool in trajectory.tools}.values())


def error_examples(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the distinct error messages of the target's tools, in recording order."""
    contents = (
        message_text(message)
        for trajectory in trajectories
        for message in trajectory.messages
        if message["role"] == "tool"
    )
    return list(dict.fromkeys(content for content in contents if _is_error(content)))[:ERROR_EXAMPLES]


def target_texts(trajectories: Sequence[Trajectory]) -> TargetTexts:
    """Return the system prompts of conversations, and the answers of their tools that report no error."""
    prompts = (parsed.system for parsed in map(transcript, trajectories))
    answers: dict[str, dict[str, None]] = {}
    for trajectory in trajectories:
        for place, message in enumerate(trajectory.messages):
            # Ids of calls may be repeated later.
            replies = takewhile(lambda reply: reply["role"] == "tool", trajectory.messages[place + 1 :])
            for name, content in tool_answers(
                message, [{**reply, "content": message_text(reply)} for reply in replies]
            ):
                if not _is_error(content):
                    answers.setdefault(name, {})[content] = None
    return TargetTexts(
        list(dict.fromkeys(prompts)),
        {name: list(contents)[:ANSWER_EXAMPLES] for name, contents in answers.items()},
    )


def _is_error(content: str) -> bool:
    try:
        payload = json.loads(content)
    except ValueError:
        return content.lower().startswith("error")
    return isinstance(payload, dict) and "error" in payload


def _base_rewards(context: Context, user: User | None) -> admission.BaseRewards:
    async def rewards(source: SandboxSource, seeds: list[int], rollouts: int) -> list[list[float]]:
        """Return one group of base-model rewards per seed, sampled as in training, with the user of training."""
        source.user = user
        temperature = context.settings.training.temperature
        policy = await model_policy(context, BASE, temperature)
        jobs = [EpisodeJob(seed, trial, "", str(seed)) for seed in seeds for trial in range(rollouts)]
        wait_s = user_wait_s(context.settings.target.user) if user is not None else 0.0
        step_s = step_timeout_s(context.settings.sandbox.call_seconds + wait_s)
        limits = Limits(context.settings.training.max_turns, context.settings.collect.concurrency, step_s)
        # Every seed gets a group, even if all its episodes are lost, so that groups are in the order of the seeds.
        groups: dict[int, list[float]] = {seed: [] for seed in seeds}
        user_faults: dict[int, str] = {}

        async def play(jobs: list[EpisodeJob], *, is_retried: bool) -> None:
            lost_jobs: list[EpisodeJob] = []
            running = run_episodes(
                source, jobs, policy, limits, model=BASE, temperature=temperature, base_seed=context.settings.seed
            )
            async for trajectory in running:
                if trajectory.end_cause is EndCause.SANDBOX_ERROR:
                    # If Docker itself is down, connect() raises EngineDown: not a failure of the environment.
                    connect().close()
                if trajectory.end_cause in (EndCause.ENGINE_ERROR, EndCause.SIMULATOR_ERROR) and is_retried:
                    lost_jobs.append(EpisodeJob(int(trajectory.task_id), trajectory.trial, "", trajectory.task_id))
                elif trajectory.end_cause is EndCause.SIMULATOR_ERROR:
                    # The user's failure costs the rollout, and is no reward of 0.
                    user_faults[int(trajectory.task_id)] = trajectory.detail
                else:
                    groups[int(trajectory.task_id)].append(_reward(trajectory))
            if lost_jobs:
                await play(lost_jobs, is_retried=False)

        await play(jobs, is_retried=True)
        for seed, detail in user_faults.items():
            if not groups[seed]:
                # Its persona and goal are the environment's, and no other seed can take its place.
                raise EnvironmentFault("user_request", f"no episode of seed {seed} has a usable user: {detail}")
        return list(groups.values())

    return rewards


def _reward(trajectory: Trajectory) -> float:
    """Return the reward of a completed episode; raise an infrastructure failure as the error it was."""
    # A lost episode is not evidence against the environment: with a reward of 0, engine faults would refuse it.
    if trajectory.outcome is not Outcome.INFRASTRUCTURE:
        return trajectory.reward
    if trajectory.end_cause is EndCause.ENGINE_ERROR:
        raise EngineError(trajectory.detail, hint="run the same command again")
    raise EpisodeLost(trajectory.detail)
