"""The selection of production conversations that are analysed together with a cycle's episodes.

Selected are judged conversations of the target that the incumbent answered from beginning to end since its newest
promotion, newest first, up to ``analysis.production``. Conversations that cannot be compared with the cycle's episodes
are left out and counted by reason: other tools, no system message, or no user message after it. No environment is made
from production: nobody has verified its solutions, and its records belong to people.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agents.errors import TranscriptError
from agents.transcript import tool_function, transcript
from store.repositories.trajectories import get_trajectories, newest_judged_ids
from store.types import Tool, Trajectory
from traced.pipeline.context import Context
from traced.pipeline.incumbent import incumbent_of

# Reasons for leaving a conversation out; they are stored in the stage's event.
OTHER_TOOLS = "its tools differ from those of the target"
NO_SYSTEM = "it has no system message"
NO_OPENING = "it does not start with a user message"
UNREADABLE = "its messages cannot be read"
JUDGED_ANEW = "its outcome has changed since"

Toolset = frozenset[tuple[str, frozenset[str]]]


@dataclass(frozen=True)
class Production:
    """The production conversations selected for an analysis, and the number left out by reason."""

    trajectories: list[Trajectory] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def production(context: Context, episodes: Sequence[Trajectory]) -> Production:
    """Return the production conversations to analyse together with the cycle's ``episodes``.

    A recorded target has none: its conversations are the collection. A cycle that takes over from another base model
    has none either: that model answered them.
    """
    if context.target.is_recorded or context.settings.model.predecessor:
        return Production()
    incumbent, limit = incumbent_of(context), context.settings.analysis.production
    with context.read_session() as session:
        ids = newest_judged_ids(
            session, context.target.name, incumbent.models, limit=limit, start=incumbent.promoted_at
        )
        trajectories = get_trajectories(session, ids, tokens=False)
    return select_comparable(trajectories, episodes)


def select_comparable(conversations: Iterable[Trajectory], episodes: Iterable[Trajectory]) -> Production:
    """Select the conversations that can be compared with ``episodes``, and give them the episodes' tool definitions."""
    tools_by_toolset = {toolset(episode.tools): episode.tools for episode in episodes}
    selected: list[Trajectory] = []
    left_out: Counter[str] = Counter()
    for trajectory in conversations:
        reason = _exclusion_reason(trajectory, tools_by_toolset)
        if reason:
            left_out[reason] += 1
        else:
            # Clients may reword tool descriptions. The target's own definitions are used, so that wording is not
            # taken for a difference.
            selected.append(replace(trajectory, tools=tools_by_toolset[toolset(trajectory.tools)]))
    return Production(selected, dict(sorted(left_out.items())))


def toolset(tools: Iterable[Tool]) -> Toolset:
    """Return the names of the tools and their parameters, which identify a set of tools."""
    functions = [tool_function(tool) for tool in tools if isinstance(tool, dict)]
    return frozenset((str(function.get("name", "")), _parameters(function)) for function in functions)


def _parameters(function: Mapping[str, object]) -> frozenset[str]:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(map(str, properties)) if isinstance(properties, dict) else frozenset()


def _exclusion_reason(trajectory: Trajectory, toolsets: Mapping[Toolset, object]) -> str:
    if toolset(trajectory.tools) not in toolsets:
        return OTHER_TOOLS
    try:
        parsed = transcript(trajectory)
    except TranscriptError:
        return UNREADABLE
    # Both must exist: the analyst reads the policy from the system message, the request from the first user message.
    if not parsed.system.strip() or trajectory.messages[0]["role"] not in ("system", "developer"):
        return NO_SYSTEM
    first = next(message for message in [*trajectory.messages, {}] if not _is_policy(message))
    return "" if first.get("role") == "user" else NO_OPENING


def _is_policy(message: Mapping[str, object]) -> bool:
    return message.get("role") in ("system", "developer")
