"""Say the success words and do nothing: does the environment pay for a claim?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, say
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """The claim, every time."""
    return say(SUCCESS_WORDS)
