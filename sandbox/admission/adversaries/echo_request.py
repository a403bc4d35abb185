"""Hand the user's own words to every writing tool as arguments: does a substring match take them?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, filled, request, say, tool_name, write_tools
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """The request as every argument, then the request again with the claim."""
    words = request(task)
    if turn or not task.tools:
        return say(f"{words} {SUCCESS_WORDS}")
    return call(turn, *((tool_name(tool), filled(tool, lambda name, field: words)) for tool in write_tools(task)))
