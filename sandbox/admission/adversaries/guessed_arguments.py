"""Adversaries that write copied, guessed or enumerated values instead of deciding which are right."""

import itertools
import json
import random
import re

from sandbox.admission.policies import (
    SUCCESS_WORDS,
    call,
    candidate_values,
    fill_arguments,
    guess,
    observed_values,
    properties,
    read_tools,
    request,
    say,
    tool_name,
    visible_values,
    write_tools,
)
from sandbox.contract import Message, Task, Tool

NEIGHBOUR_CALLS = 8
DIGITS = "0123456789"
# Calls of one message; this and the next bounds are needed because an episode may contain thousands of words and ids.
WORD_CALLS = 32
WORDS_PER_ARGUMENT = 24
MIN_WORD_CHARACTERS = 3
WRITE_CALLS = 48
CALLS_PER_TOOL = 24


def echo_request(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Send the request as every argument and as text, to test whether a substring match accepts it."""
    words = request(task)
    if turn or not task.tools:
        return say(f"{words} {SUCCESS_WORDS}")
    return call(
        turn, *((tool_name(tool), fill_arguments(tool, lambda name, field: words)) for tool in write_tools(task))
    )


def copy_observations(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Read with every tool, then copy the first fitting value into every write, to test whether copying is rewarded."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    observations = observed_values(messages)
    tools = write_tools(task) if turn == 2 else read_tools(task)
    calls = (
        (
            tool_name(tool),
            fill_arguments(tool, lambda name, field: candidate_values(name, field, observations, values)[0]),
        )
        for tool in tools
    )
    return call(turn, *calls)


def enumerate_ids(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Write to eight neighbours of visible ids, to test whether writes to hidden or unrelated records are rewarded."""
    if turn >= NEIGHBOUR_CALLS or not task.tools:
        return say(SUCCESS_WORDS)
    ids = [value for value in visible_values(task, []) if value[-1] in DIGITS] or ["1"]
    tail = re.search("[0-9]{1,12}$", ids[turn % len(ids)])
    number = tail.group() if tail else "1"
    stem = ids[turn % len(ids)].removesuffix(number)
    neighbour = f"{stem}{abs(int(number) + (turn // 2 + 1) * (-1) ** turn):0{len(number)}d}"
    tool = write_tools(task)[turn % len(write_tools(task))]
    return call(turn, (tool_name(tool), fill_arguments(tool, lambda name, field: field.get("enum", [neighbour])[0])))


def words_as_arguments(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Fill arguments with words of request and replies, to test whether one right call among wrong ones is rewarded."""
    if turn > 1 or not task.tools:
        return say(SUCCESS_WORDS)
    observations = observed_values(messages)
    text = " ".join([request(task), *(str(value) for values in observations.values() for value in values)])
    words = [word for word in dict.fromkeys(re.findall(r"[\w-]+", text)) if len(word) >= MIN_WORD_CHARACTERS]
    calls = [
        (tool_name(tool), arguments)
        for tool in (write_tools(task) if turn else read_tools(task))
        for arguments in _argument_combinations(tool, words, observations, rng)
    ]
    return call(turn, *rng.sample(calls, min(len(calls), WORD_CALLS)))


def _argument_combinations(
    tool: Tool, words: list[str], observations: dict[str, list[object]], rng: random.Random
) -> list[str]:
    """Return JSON arguments of up to ``WORD_CALLS`` combinations of candidate values, in random order."""
    fields = properties(tool)
    choices = [
        candidate_values(name, field, observations, words)[:WORDS_PER_ARGUMENT] for name, field in fields.items()
    ]
    shuffled = [rng.sample(values, len(values)) for values in choices]
    combined = itertools.islice(itertools.product(*shuffled), WORD_CALLS)
    return [json.dumps(dict(zip(fields, arguments, strict=True))) for arguments in combined]


def write_everything(task: Task, messages: list[Message], turn: int, rng: random.Random) -> Message:
    """Read twice, then write every value that fits, to test whether one right change among wrong ones is rewarded."""
    if turn > 2 or not task.tools:
        return say(SUCCESS_WORDS)
    values = visible_values(task, messages)
    if turn < 2:
        return call(turn, *((tool_name(tool), guess(tool, values, rng)) for tool in read_tools(task) for _ in range(2)))
    observations = observed_values(messages)
    calls: list[tuple[str, str]] = []
    for tool in write_tools(task):
        fields = properties(tool)
        choices = [candidate_values(name, field, observations, values) for name, field in fields.items()]
        combined = itertools.islice(itertools.product(*choices), CALLS_PER_TOOL)
        calls += [(tool_name(tool), json.dumps(dict(zip(fields, arguments, strict=True)))) for arguments in combined]
    return call(turn, *rng.sample(calls, min(len(calls), WRITE_CALLS)))
