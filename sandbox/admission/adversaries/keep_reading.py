"""Look things up until the turns are used up: does an episode that runs out of turns end as a success?"""

import random

from sandbox.admission.policies import PATIENCE, call, guess, read_tools, say, tool_name, visible_values
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """One look after the other; words at the very end."""
    if turn >= PATIENCE - 1 or not task.tools:
        return say("I am still looking.")
    tool = rng.choice(read_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages[-2:]), rng)))
