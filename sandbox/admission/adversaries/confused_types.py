"""Send each argument as another type (text, 1, true, null, a list): does a loose comparison hold?"""

import random
from collections.abc import Callable
from typing import Any

from sandbox.admission.policies import SUCCESS_WORDS, call, filled, request, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

FORMS: tuple[Callable[[str], Any], ...] = (
    lambda text: True,
    lambda text: 0,
    lambda text: None,
    lambda text: [text],
    lambda text: {"id": text},
    lambda text: int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else 1.0,
    lambda text: "",
    lambda text: "*",
)


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """A form of this request's own twice, for what ends at the first writes, then all in turn; then the claim."""
    forms = [random.Random(request(task)).choice(FORMS)] * 2 + [*FORMS]
    if turn >= len(forms) or not task.tools:
        return say(SUCCESS_WORDS)
    value = forms[turn](rng.choice(visible_values(task, messages) or ["1"]))
    return call(turn, *((tool_name(tool), filled(tool, lambda name, field: value)) for tool in write_tools(task)))
