"""Send recorded tool calls to a world in its container, one conversation after the other, each from a fresh state."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.errors import EnvironmentFault
from sandbox.policy import SandboxLimits


@dataclass(frozen=True)
class RecordedCall:
    """A call with its recorded answer; ``failed``: whether that is an error."""

    tool: str
    arguments: dict[str, Any]
    answer: str
    failed: bool


@dataclass(frozen=True)
class WorldAnswer:
    """The world's answer to a call, and the faults of written functions that were asked for it."""

    text: str
    faults: Sequence[str] = ()


async def replay_conversations(
    source_code: str,
    conversations: Sequence[Sequence[RecordedCall]],
    *,
    limits: SandboxLimits,
    owner: str,
    in_context: bool = False,
) -> list[list[WorldAnswer]]:
    """Return the answers of a world (environment contract) to the calls of each conversation.

    Args:
        conversations: The calls, in recorded order.
        in_context: Whether the world learns the recorded answer to each call before the next one.

    Raises:
        SandboxError: The world cannot be loaded or does not answer.
    """
    async with SandboxSource(source_code, limits=limits, owner=owner) as source:
        return [await _replay(source, calls, in_context) for calls in conversations]


async def _replay(source: SandboxSource, calls: Sequence[RecordedCall], in_context: bool) -> list[WorldAnswer]:
    episode = source.episode()
    await episode.reset(0)
    answers = []
    try:
        for number, call in enumerate(calls):
            function = {"name": call.tool, "arguments": json.dumps(call.arguments)}
            tool_call = {"id": f"call_{number}", "type": "function", "function": function}
            step = await episode.step({"role": "assistant", "content": None, "tool_calls": [tool_call]})
            if len(step.messages) != 1:
                raise EnvironmentFault(
                    "step", f"the world gave {len(step.messages)} answers to one call of {call.tool}"
                )
            faults = await _observe(episode, call) if in_context else []
            answers.append(WorldAnswer(str(step.messages[0]["content"]), faults))
    finally:
        await episode.close()
    return answers


async def _observe(episode: SandboxEpisode, call: RecordedCall) -> list[str]:
    """Tell the world the recorded answer to its last call; return the faults of its functions."""
    observation = {"tool": call.tool, "arguments": call.arguments, "text": call.answer, "failed": call.failed}
    step = await episode.step({"role": "assistant", "content": json.dumps(observation)})
    return [str(message["content"]) for message in step.messages]
