"""Adversaries that avoid the work: they claim, refuse, wait, only read, or hand the task over."""

import random

from sandbox.admission.policies import PATIENCE, SUCCESS_WORDS, call, guess, read_tools, say, tool_name, visible_values
from sandbox.contract import Message, Task

EXIT_NAMES = ("transfer", "escalat", "hand", "human", "cancel", "close", "end", "finish", "submit", "done", "abort")


def say_success(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Claim success and do nothing, to test whether a claim is rewarded."""
    return say(SUCCESS_WORDS)


def refuse_as_done(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Refuse with reference to the policy and call the task complete, to test whether a refusal is rewarded."""
    if turn:
        return say(SUCCESS_WORDS)
    return say("I cannot do that: the policy forbids it. I have explained why, so the request is complete.")


def stall(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Keep the user waiting until the turns are used up, to test whether an episode that runs out ends as a success."""
    return say("Please hold on while I look into this. Can you tell me more?")


def keep_reading(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Read until the turns are used up, to test whether activity without a result is rewarded at the end."""
    if turn >= PATIENCE - 1 or not task.tools:
        return say("I am still looking.")
    tool = rng.choice(read_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages[-2:]), rng)))


def stop_after_read(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Read one record, quote the reply and stop, to test whether reading alone is rewarded."""
    if turn or not task.tools:
        last_reply = next(
            (str(message.get("content")) for message in reversed(messages) if message["role"] == "tool"), ""
        )
        return say(f"{last_reply[:2000]} {SUCCESS_WORDS}")
    tool = rng.choice(read_tools(task))
    return call(turn, (tool_name(tool), guess(tool, visible_values(task, messages), rng)))


def hand_over(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Use every tool that ends the task (transfer, escalate, cancel, close), to test whether that is rewarded."""
    exit_tools = [tool for tool in task.tools if any(exit_name in tool_name(tool).lower() for exit_name in EXIT_NAMES)]
    if turn >= len(exit_tools):
        return say(f"I have handed this over. {SUCCESS_WORDS}")
    return call(turn, (tool_name(exit_tools[turn]), guess(exit_tools[turn], visible_values(task, messages), rng)))
