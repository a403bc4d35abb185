"""Make one call six times: does each success pay again, or any activity?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """The first call again, then the claim."""
    if turn >= 6 or not task.tools:
        return say(SUCCESS_WORDS)
    first = next((message for message in messages if message.get("tool_calls")), None)
    if first is not None:
        function = first["tool_calls"][0]["function"]
        return call(turn, (function["name"], function["arguments"]))
    tool = rng.choice(task.tools)
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))
