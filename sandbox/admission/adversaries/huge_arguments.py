"""Send arguments of great length: does a cut, a slow match or a containment test let them through?"""

import random
from typing import Any

from sandbox.admission.policies import SUCCESS_WORDS, call, filled, request, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

CHARACTERS = 20_000
NUMBER = 10**15
ITEMS = 1_000


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """All that is visible in one long text, then long lists, then the claim."""
    if turn > 1 or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    words = " ".join([*visible_values(task, messages), request(task), "yes true ok 1 "])
    text = (words * (CHARACTERS // len(words) + 1))[:CHARACTERS]

    def huge(name: str, field: dict[str, Any]) -> Any:
        if field.get("type") in {"integer", "number"}:
            return NUMBER
        return [text[:8]] * ITEMS if turn else text

    return call(turn, (tool_name(tool), filled(tool, huge)))
