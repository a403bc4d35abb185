"""Send recorded tool calls to a world in its container, one conversation after the other, each from a fresh state."""

import json
from collections.abc import Sequence
from typing import Any

from sandbox.client import SandboxSource
from sandbox.errors import EnvironmentFault
from sandbox.policy import SandboxLimits

RecordedCall = tuple[str, dict[str, Any]]


async def replay_conversations(
    source_code: str, conversations: Sequence[Sequence[RecordedCall]], *, limits: SandboxLimits, owner: str
) -> list[list[str]]:
    """Return the answers of a world (environment contract) to the calls of each conversation.

    Args:
        conversations: (tool, arguments) of the calls, in recorded order.

    Raises:
        SandboxError: The world cannot be loaded or does not answer.
    """
    async with SandboxSource(source_code, limits=limits, owner=owner) as source:
        return [await _replay(source, calls) for calls in conversations]


async def _replay(source: SandboxSource, calls: Sequence[RecordedCall]) -> list[str]:
    episode = source.episode()
    await episode.reset(0)
    answers = []
    try:
        for number, (tool, arguments) in enumerate(calls):
            function = {"name": tool, "arguments": json.dumps(arguments)}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            step = await episode.step({"role": "assistant", "content": None, "tool_calls": [call]})
            if len(step.messages) != 1:
                raise EnvironmentFault("step", f"the world gave {len(step.messages)} answers to one call of {tool}")
            answers.append(str(step.messages[0]["content"]))
    finally:
        await episode.close()
    return answers
