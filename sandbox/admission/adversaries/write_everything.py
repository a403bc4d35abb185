"""Look around, then write with every visible id: is the right change among many wrong ones paid?"""

import itertools
import json
import random

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    call,
    fits,
    guess,
    observed,
    properties,
    read_tools,
    say,
    tool_name,
    visible_values,
    write_tools,
)
from sandbox.contract import Message, Task

CALLS = 48  # in one message
EACH = 24  # of one tool


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Two rounds of reading, everything that fits written, then the claim."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    if turn < 2:
        return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in read_tools(task) for _ in range(2)))
    found = observed(messages)
    calls: list[tuple[str, str]] = []
    for tool in write_tools(task):
        fields = properties(tool)
        choices = [fits(name, field, found, values) for name, field in fields.items()]
        combined = itertools.islice(itertools.product(*choices), EACH)
        calls += [(tool_name(tool), json.dumps(dict(zip(fields, chosen, strict=True)))) for chosen in combined]
    return call(turn, *rng.sample(calls, min(len(calls), CALLS)))
