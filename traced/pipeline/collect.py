"""Collect: the base model's episodes on the target's train split, the analysis' input.

Production in a cycle's analysis: which of the target's judged conversations are mined beside the cycle's episodes.

What counts: conversations of the target that no cycle recorded (the router's, or imported), answered by the base model
from beginning to end, judged a success or a failure; the newest ``analysis.production`` of them, by their last
exchange (those without one, imports, come last). Capabilities are what the base model lacks, so an adapter's answers
say nothing of them. Left out, and counted by reason in the stage's event: what offered the agent other tools than the
target does (same names, same parameters; descriptions may differ), and what does not begin with a system message and
then the user's words, because the policy and the request are what the analyst reads.

Invariants: what is kept carries the target's own schema of its tools, so that a client's rewording of them is no
difference; the set of a cycle is that of its labels, stored with them (``analyzed``). Production is never lifted into
an environment: nobody has verified its solutions as the target verifies an episode's, and its records are people's.
Not covered: conversations from before the base model was exchanged for another one in the same store.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sqlmodel import Session

from agents.errors import TranscriptError
from agents.transcript import tool_function, transcript
from store.repositories.capabilities import labelled_trajectories
from store.repositories.trajectories import TrajectoryFilter, get_trajectories, list_trajectories, newest_judged
from store.types import Outcome, Tool, Trajectory
from traced.evaluation.intervals import rate
from traced.evaluation.report import percent
from traced.pipeline.context import Context, Shown
from traced.pipeline.episodes import BASE, episodes, model_policy, split_jobs
from traced.rollouts.episodes import EpisodeJob


async def collect(context: Context) -> list[Trajectory]:
    """Record ``collect.episodes`` episodes; those recorded before are kept."""
    wanted = collect_jobs(context)
    temperature = context.settings.collect.temperature
    with context.stage("collect", "Collect the base model's episodes", total=len(wanted)) as shown:
        policy = await model_policy(context, BASE, temperature)
        async with context.target.source() as source:
            found = await episodes(
                context, source, wanted, policy, model=BASE, temperature=temperature, tick=success_so_far(shown)
            )
        summary = rate(BASE, found)
        shown.found = {"episodes": summary.episodes, "success": summary.rate, "infrastructure": summary.infrastructure}
        shown.figure = f"success {percent(summary.rate)}"
    return found


def collect_jobs(context: Context) -> list[EpisodeJob]:
    """Seeds drawn from the train split by the settings' seed."""
    rng = random.Random(f"collect:{context.settings.seed}")
    return split_jobs("train", rng.sample(context.target.splits["train"], context.settings.collect.episodes))


def collected(context: Context) -> list[Trajectory]:
    """The cycle's collected trajectories, in the store's order."""
    wanted = TrajectoryFilter(source=context.target.name, split="train", model=BASE, cycle_id=context.cycle_id)
    with context.reading() as session:
        return list_trajectories(session, wanted)


def success_so_far(shown: Shown) -> Callable[[Trajectory | None], None]:
    """A tick that advances a stage's line by one episode and shows the success so far."""
    seen: Counter[Outcome] = Counter()

    def tick(trajectory: Trajectory | None) -> None:
        if trajectory is not None:
            seen[trajectory.outcome] += 1
        sound = seen[Outcome.SUCCESS] + seen[Outcome.FAILURE]
        shown.advance(figure=f"success {percent(seen[Outcome.SUCCESS] / sound)}" if sound else None)

    return tick


OTHER_TOOLS = "its tools are not the target's"
NO_SYSTEM = "it has no system message"
NO_OPENING = "it does not begin with the user's words"
UNREADABLE = "its messages cannot be read"
JUDGED_ANEW = "it was judged anew meanwhile"

Toolset = frozenset[tuple[str, frozenset[str]]]


@dataclass(frozen=True)
class Production:
    """The conversations that are mined, and how many are not, by reason."""

    trajectories: list[Trajectory] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def production(context: Context, episodes: Sequence[Trajectory]) -> Production:
    """What production adds to the cycle's ``episodes`` now."""
    with context.reading() as session:
        ids = newest_judged(session, context.target.name, BASE, limit=context.settings.analysis.production)
        found = get_trajectories(session, ids, tokens=False)
    return sift(found, episodes)


def sift(found: Iterable[Trajectory], episodes: Iterable[Trajectory]) -> Production:
    """Keep the conversations that can be compared with ``episodes``, with the tools that those were offered."""
    offered = {toolset(episode.tools): episode.tools for episode in episodes}
    kept: list[Trajectory] = []
    left_out: Counter[str] = Counter()
    for trajectory in found:
        why = _why_not(trajectory, offered)
        if why:
            left_out[why] += 1
        else:
            kept.append(replace(trajectory, tools=offered[toolset(trajectory.tools)]))
    return Production(kept, dict(sorted(left_out.items())))


def toolset(tools: Iterable[Tool]) -> Toolset:
    """What makes two lists of tools the same: their names and the names of their parameters."""
    functions = [tool_function(tool) for tool in tools if isinstance(tool, dict)]
    return frozenset((str(function.get("name", "")), _parameters(function)) for function in functions)


def analyzed(session: Session, cycle_id: str) -> list[Trajectory]:
    """All that a cycle has labelled, episodes and production's, in the store's order."""
    return get_trajectories(session, labelled_trajectories(session, cycle_id), tokens=False)


def _parameters(function: Mapping[str, object]) -> frozenset[str]:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(map(str, properties)) if isinstance(properties, dict) else frozenset()


def _why_not(trajectory: Trajectory, offered: Mapping[Toolset, object]) -> str:
    if toolset(trajectory.tools) not in offered:
        return OTHER_TOOLS
    try:
        read = transcript(trajectory)
    except TranscriptError:
        return UNREADABLE
    if not read.system.strip() or trajectory.messages[0]["role"] not in ("system", "developer"):
        return NO_SYSTEM
    first = next(message for message in [*trajectory.messages, {}] if not _is_policy(message))
    return "" if first.get("role") == "user" else NO_OPENING


def _is_policy(message: Mapping[str, object]) -> bool:
    return message.get("role") in ("system", "developer")
