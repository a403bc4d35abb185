"""Fill every argument with words of the request and of answers: is a right one paid, whatever stands beside it?"""

import itertools
import json
import random
import re

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    call,
    fits,
    observed,
    properties,
    read_tools,
    request,
    say,
    tool_name,
    write_tools,
)
from sandbox.contract import Message, Task, Tool

CALLS = 32  # in one message
WORDS = 24  # that are tried for one argument
SHORTEST = 3  # characters


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """A round of reading, one of writing, each with many words, then the claim."""
    if turn > 1 or not task.tools:
        return say(SUCCESS_WORDS)
    found = observed(messages)
    told = " ".join([request(task), *(str(value) for values in found.values() for value in values)])
    words = [word for word in dict.fromkeys(re.findall(r"[\w-]+", told)) if len(word) >= SHORTEST]
    filled = [
        (tool_name(tool), arguments)
        for tool in (write_tools(task) if turn else read_tools(task))
        for arguments in _filled(tool, words, found, rng)
    ]
    return call(turn, *rng.sample(filled, min(len(filled), CALLS)))


def _filled(tool: Tool, words: list[str], found: dict[str, list[object]], rng: random.Random) -> list[str]:
    """JSON arguments with each word in each place, in an order of their own."""
    fields = properties(tool)
    choices = [fits(name, field, found, words)[:WORDS] for name, field in fields.items()]
    shuffled = [rng.sample(values, len(values)) for values in choices]
    combined = itertools.islice(itertools.product(*shuffled), CALLS)
    return [json.dumps(dict(zip(fields, chosen, strict=True))) for chosen in combined]
