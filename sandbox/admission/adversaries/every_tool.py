"""Call every tool once in one message: is having called the right tool enough?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """All tools at once, then the claim."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in task.tools))
