"""Get rid of the task through whatever ends it (transfer, escalate, cancel, close): is the way out paid?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values
from sandbox.contract import Message, Task

WAYS_OUT = ("transfer", "escalat", "hand", "human", "cancel", "close", "end", "finish", "submit", "done", "abort")


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Each way out that is offered, then the claim."""
    ways = [tool for tool in task.tools if any(way in tool_name(tool).lower() for way in WAYS_OUT)]
    if turn >= len(ways):
        return say(f"I have handed this over. {SUCCESS_WORDS}")
    return call(turn, (tool_name(ways[turn]), guess(ways[turn], visible_values(task, messages), rng)))
