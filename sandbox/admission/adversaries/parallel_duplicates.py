"""Send the same writing call eight times in one message: is each of them paid, or a check passed by?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

COPIES = 8


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """One write in eight copies, then the claim."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    one = (tool_name(tool), guess(tool, visible_values(task, messages), rng))
    return call(turn, *[one] * COPIES)
