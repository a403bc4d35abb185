"""Evaluate: the untouched test split under the floor policy, the base, each promoted adapter alone, and the router.

Invariants: all policies play the same seeds at the evaluation temperature; the router sees what production would show
it (the opening messages) and its choices are stored with their log-probs. Called again it runs what is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sandbox.contract import Message, Tool
from sandbox.episodes import EpisodeSource
from store.records import AdapterVersion, RoutingChoice
from store.repositories.adapters import get_adapter
from store.repositories.analysis import get_capability
from store.repositories.routing import save_routing
from store.repositories.trajectories import TrajectoryFilter, list_trajectories
from store.types import Capability, Outcome, Trajectory
from traced.figures import FLOOR, ROUTED
from traced.rollout.episodes import EpisodeJob
from traced.rollout.policy import Completion, Policy
from traced.serving.router import Route, RoutedPolicy
from traced.serving.routing_prompt import opening_text
from traced.stages.collect import success_so_far
from traced.stages.context import Context
from traced.stages.episodes import BASE, episodes, model_policy, split_jobs
from traced.stages.train import adapter_path


@dataclass(frozen=True)
class DoNothing:
    """The floor: an agent that says nothing and calls nothing."""

    async def complete(self, messages: list[Message], tools: list[Tool], *, seed: int) -> Completion:
        """An empty message."""
        return Completion({"role": "assistant", "content": ""}, [], [], [], "stop")


async def evaluate(context: Context, promoted: Sequence[str]) -> None:
    """Play the test split with every policy; with no promoted adapter there is nothing to route to."""
    async with context.target.source() as source:
        await on_test(context, source, FLOOR, DoNothing(), "Test: do nothing")
        await _model_on_test(context, source, BASE, "Test: base model")
        for name in promoted:
            await context.serve(name, adapter_path(context, name))
            await _model_on_test(context, source, name, f"Test: {name} alone")
        if promoted:
            await _routed(context, source, promoted)


def test_jobs(context: Context) -> list[EpisodeJob]:
    """The first seeds of the test split."""
    return split_jobs("test", context.target.splits["test"][: context.settings.test.seeds])


async def on_test(context: Context, source: EpisodeSource, model: str, policy: Policy, title: str) -> list[Trajectory]:
    """One policy's episodes on the test seeds."""
    jobs = test_jobs(context)
    with context.stage(f"evaluate {model}", title, total=len(jobs)) as shown:
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


async def _routed(context: Context, source: EpisodeSource, promoted: Sequence[str]) -> None:
    settings = context.settings.engine
    policy = RoutedPolicy(
        await context.engine(),
        [route(context, name) for name in promoted],
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
    )
    played = await on_test(context, source, ROUTED, policy, "Test: routed")
    choices = []
    for trajectory in played:
        if trajectory.outcome is not Outcome.INFRASTRUCTURE:
            decision = await policy.route(trajectory.messages)
            choices.append(RoutingChoice(trajectory.id, decision.model, decision.logprobs, decision.seconds))
    with context.writing() as session:
        save_routing(session, choices)


def route(context: Context, adapter: str) -> Route:
    """An adapter's line in the routing prompt: its capability, and how one task that it solved in its gate opened."""
    version, meant = described(context, adapter)
    wanted = TrajectoryFilter(
        source=f"env:{version.environment_hash[:12]}", model=adapter, outcome=Outcome.SUCCESS, cycle_id=context.cycle_id
    )
    with context.reading() as session:
        solved = list_trajectories(session, wanted, limit=1)
    example = opening_text(_opening(solved[0].messages)) if solved else ""
    return Route(adapter, meant.title, meant.description, example)


def described(context: Context, adapter: str) -> tuple[AdapterVersion, Capability]:
    """A version and the capability that it was trained for."""
    with context.reading() as session:
        version = get_adapter(session, adapter)
        return version, get_capability(session, version.cycle_id, version.capability)


def _opening(messages: Sequence[Message]) -> list[Message]:
    """The messages before the agent's first."""
    first = next((place for place, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
    return list(messages[:first])
