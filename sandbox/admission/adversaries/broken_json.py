"""Send arguments that are no JSON object: does an error path count as a call, or crash into success?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, say, tool_name, write_tools
from sandbox.contract import Message, Task

BROKEN = ("", "{", "null", "[]", '{"order_id": ', "{'id': 1}", '"{}"', "{} {}", '{"a": 1,}')


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """One broken form a turn, to every writing tool; then the claim."""
    if turn >= len(BROKEN) or not task.tools:
        return say(SUCCESS_WORDS)
    return call(turn, *((tool_name(tool), BROKEN[turn]) for tool in write_tools(task)))
