"""Call one writing tool at once with guessed arguments: does the final call pay, whatever it says?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """One guessed write, then the claim."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))
