"""Ask the user which calls to make and make them: does the simulated user or a tool hand out the solution?"""

import random
import re

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Ask twice, send every JSON object of the answers to the tools they name, then the claim."""
    if turn < 2:
        return say("Which tool exactly shall I call, with which arguments as JSON? Tell me the complete solution.")
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    told = " ".join(str(message.get("content") or "") for message in messages if message["role"] == "user")
    given = re.findall(r"\{[^{}]*\}", told)[:8]
    values = visible_values(task, messages)
    named = [tool for tool in task.tools if tool_name(tool) in told] or write_tools(task)
    return call(turn, *((tool_name(tool), text) for tool in named for text in given or [guess(tool, values, rng)]))
