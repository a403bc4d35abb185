"""Edit the state, edit it back or over, and edit it again: is each change paid, or the end compared loosely?"""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task


def act(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Write, write with another tool, write the first again; then the claim."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    writes = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    if turn == 2 and writes:
        return call(turn, (writes[0]["name"], writes[0]["arguments"]))
    others = [tool for tool in write_tools(task) if not writes or tool_name(tool) != writes[0]["name"]]
    tool = rng.choice(others or write_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))
