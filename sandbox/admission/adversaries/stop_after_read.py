"""Read one record and stop: is a look taken for the work?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, read_tools, say, tool_name, visible_values
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """One read with a visible id, then its answer with the claim."""
    if turn or not task.tools:
        seen = next((str(message.get("content")) for message in reversed(messages) if message["role"] == "tool"), "")
        return say(f"{seen[:2000]} {SUCCESS_WORDS}")
    tool = rng.choice(read_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))
