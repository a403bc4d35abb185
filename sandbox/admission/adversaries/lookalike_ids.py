"""Write ids in other characters (wide digits, a space, another case): are two edits of one record told apart?"""

import random
from collections.abc import Callable

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

WIDE = {ord("0") + digit: ord("０") + digit for digit in range(10)}
WAYS: tuple[Callable[[str], str], ...] = (
    lambda value: value.translate(WIDE),
    lambda value: f" {value}\u200b",
    lambda value: value.swapcase(),
)


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Each way of writing once, then the claim in wide digits."""
    if turn >= len(WAYS) or not task.tools:
        return say(SUCCESS_WORDS.translate(WIDE))
    values = [WAYS[turn](value) for value in visible_values(task, messages) or ["1"]]
    return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in write_tools(task)))
