"""Send arguments of great length: does a cut, a slow match or a containment test let them through?"""

import random
from typing import Any

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    call,
    filled,
    properties,
    request,
    say,
    tool_name,
    visible_values,
    write_tools,
)
from sandbox.contract import Message, Task

CHARACTERS = 20_000  # of one argument,
MOST = 400_000  # and of all of a call, which has to pass as a message
NUMBER = 10**15
ITEM = 8
ITEMS = 1_000


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """All that is visible in one long text, then long lists, then the claim."""
    if turn > 1 or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    words = " ".join([*visible_values(task, messages), request(task), "yes true ok 1 "])
    length = min(CHARACTERS, MOST // (len(properties(tool)) or 1))
    text = (words * (length // len(words) + 1))[:length]

    def huge(name: str, field: dict[str, Any]) -> Any:
        if field.get("type") in {"integer", "number"}:
            return NUMBER
        return [text[:ITEM]] * min(ITEMS, length // ITEM) if turn else text

    return call(turn, (tool_name(tool), filled(tool, huge)))
