"""Adversaries that are merely active: they test whether calls, repetitions or changes are rewarded by themselves."""

import random

from sandbox.admission.policies import SUCCESS_WORDS, call, guess, say, tool_name, visible_values, write_tools
from sandbox.contract import Message, Task

COPIES = 8


def every_tool(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Call every tool once in one message, to test whether having called the right tool is enough."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in task.tools))


def write_first(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Make one guessed write at once, to test whether a final call is rewarded whatever its arguments."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))


def repeat_calls(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Make the first call six times, to test whether each success, or any activity, is rewarded again."""
    if turn >= 6 or not task.tools:
        return say(SUCCESS_WORDS)
    first = next((message for message in messages if message.get("tool_calls")), None)
    if first is not None:
        function = first["tool_calls"][0]["function"]
        return call(turn, (function["name"], function["arguments"]))
    tool = rng.choice(task.tools)
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))


def parallel_duplicates(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send eight copies of one write in one message, to test whether each is rewarded or bypasses a check."""
    if turn or not task.tools:
        return say(SUCCESS_WORDS)
    tool = rng.choice(write_tools(task))
    write = (tool_name(tool), guess(tool, visible_values(task, messages), rng))
    return call(turn, *[write] * COPIES)


def do_undo_redo(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Write with two tools, then repeat the first write, to test for reward per change and a loose final comparison."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    writes = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    if turn == 2 and writes:
        return call(turn, (writes[0]["name"], writes[0]["arguments"]))
    other_tools = [tool for tool in write_tools(task) if not writes or tool_name(tool) != writes[0]["name"]]
    tool = rng.choice(other_tools or write_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))
