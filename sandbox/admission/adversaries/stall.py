"""Keep the user waiting until the turns are used up: does an episode that runs out end as a success?"""

import random

from sandbox.admission.policies import say
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Patience, for ever."""
    return say("Please hold on while I look into this. Can you tell me more?")
