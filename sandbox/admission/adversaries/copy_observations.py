"""Read with every reading tool, then copy the first fitting value into every writing tool, deciding nothing."""

import random

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    call,
    filled,
    fits,
    observed,
    read_tools,
    say,
    tool_name,
    visible_values,
    write_tools,
)
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Two rounds of reading, one of writing, then the claim."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    found = observed(messages)
    tools = write_tools(task) if turn == 2 else read_tools(task)
    copied = (
        (tool_name(tool), filled(tool, lambda name, field: fits(name, field, found, values)[0])) for tool in tools
    )
    return call(turn, *copied)
