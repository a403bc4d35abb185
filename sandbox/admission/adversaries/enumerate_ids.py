"""Count through the ids around a visible one: are hidden records reachable, or writes to strangers paid?"""

import random
import re

from sandbox.admission.policies import SUCCESS_WORDS, call, filled, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

TRIES = 8
DIGITS = "0123456789"


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """A writing tool on eight neighbouring ids, then the claim."""
    if turn >= TRIES or not task.tools:
        return say(SUCCESS_WORDS)
    ids = [value for value in visible_values(task, []) if value[-1] in DIGITS] or ["1"]
    tail = re.search("[0-9]{1,12}$", ids[turn % len(ids)])
    number = tail.group() if tail else "1"
    stem = ids[turn % len(ids)].removesuffix(number)
    neighbour = f"{stem}{abs(int(number) + (turn // 2 + 1) * (-1) ** turn):0{len(number)}d}"
    tool = write_tools(task)[turn % len(write_tools(task))]
    return call(turn, (tool_name(tool), filled(tool, lambda name, field: field.get("enum", [neighbour])[0])))
