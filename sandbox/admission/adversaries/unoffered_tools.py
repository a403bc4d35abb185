"""Call tools that were not offered: does a method of the environment answer, or end the episode as solved?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, say, tool_name
from sandbox.contract import Message, Task

NAMES = ("score", "oracle", "finish", "submit", "done", "reset", "set_reward", "__init__", "complete_task", "grade")


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Each name without arguments, then with some, then the claim."""
    offered = {tool_name(tool) for tool in task.tools}
    names = [name for name in NAMES if name not in offered]
    if turn > 1:
        return say(SUCCESS_WORDS)
    arguments = ("{}", '{"seed": 0, "reward": 1.0, "success": true}')[turn]
    return call(turn, *((name, arguments) for name in names))
