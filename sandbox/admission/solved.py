"""Whether a rewarded episode of an adversary was the task itself, done: then it is no shortcut.

An adversary that tries everything may also do what was asked, where everything else is refused. It has solved the task
when the writes that were accepted are exactly the oracle's, and every value in them had been read by then, in the
prompt or an answer. A value that was guessed or counted up to, and any other write that was accepted, is a shortcut.

Accepted is what is not answered in the form in which this environment answers unknown tools and broken JSON. How it
fails: where the oracle's own writes are answered in that form, or one of the two cannot be played, nothing counts as
solved. Not covered: truth values, which no text spells out, and values that have to be reckoned.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandbox.admission.bench import Bench, Played, noting, replay, together
from sandbox.admission.fingerprint import canonical
from sandbox.admission.interface import error_form
from sandbox.admission.policies import call, tool_name, write_tools
from sandbox.contract import Message, Task
from sandbox.errors import EnvironmentFault

Form = tuple[str, ...]
REFUSED_ON = 4  # seeds on which it is seen how a call is refused


@dataclass(frozen=True)
class Write:
    """A call to a writing tool, its arguments as canonical JSON, with the answer and how much had been read before."""

    name: str
    arguments: str
    answer: str
    read: int  # of ``_texts``


@dataclass(frozen=True)
class Solutions:
    """What the oracle writes on each seed, and how a call is refused."""

    writes: dict[int, list[tuple[str, str]]]
    refused: frozenset[Form]


async def solutions(bench: Bench, count: int) -> Solutions | None:
    """Those of the panel's first ``count`` seeds; None where they cannot be told."""
    try:
        plays = await bench.oracle_plays(count)
        refused = await _refused(bench)
    except EnvironmentFault:  # other checks tell of it
        return None
    seeds = bench.panel(count)
    written = {seed: list(_writes(one.task, bench.chat(one))) for seed, one in zip(seeds, plays, strict=True)}
    return told_apart(written, refused)


def told_apart(written: dict[int, list[Write]], refused: frozenset[Form]) -> Solutions | None:
    """What the oracle wrote, as solutions; None where it is answered as if it had been refused."""
    if any(error_form(write.answer) in refused for writes in written.values() for write in writes):
        return None
    return Solutions({seed: _deeds(writes) for seed, writes in written.items()}, refused)


async def _refused(bench: Bench) -> frozenset[Form]:
    """The forms of the answers to calls that no environment can take."""
    first = (await bench.oracle_plays(1))[0].task
    name = tool_name(first.tools[0]) if first.tools else "no_such_tool"
    script = [call(0, ("no_such_tool", "{}")), call(1, (name, "{not json"))]
    replays = await together(noting(seed, replay(bench.twin, seed, script)) for seed in bench.panel(REFUSED_ON))
    replies = [reply for one in replays for step in one.data[3 : 3 + len(script)] for reply in step[0]]
    return frozenset(error_form(str(reply["content"])) for reply in replies if reply["role"] == "tool")


def solves(played: Played, known: Solutions) -> bool:
    """Whether it succeeded by the oracle's writes and no other that was accepted, from values that had been read."""
    if not played.score.success:
        return False
    writes = _writes(played.task, played.messages)
    accepted = [write for write in writes if error_form(write.answer) not in known.refused]
    wanted = known.writes[played.seed]
    if not wanted or _deeds(accepted) != wanted:
        return False
    texts = list(_texts(played.task, played.messages))
    return all(_was_read(write, "\n".join(texts[: write.read]).casefold()) for write in accepted)


def _deeds(writes: list[Write]) -> list[tuple[str, str]]:
    return sorted((write.name, write.arguments) for write in writes)


def _writes(task: Task, messages: list[Message]) -> Iterator[Write]:
    """Every call to a writing tool, in order."""
    names = {tool_name(tool) for tool in write_tools(task)}
    answers = {reply.get("tool_call_id"): str(reply.get("content")) for reply in messages if reply["role"] == "tool"}
    read = 1 + len(task.messages)
    for message in messages:
        for one in message.get("tool_calls") or []:
            name, arguments = one["function"]["name"], _parsed(one["function"]["arguments"])
            if name in names:
                yield Write(name, canonical(arguments), answers.get(one["id"], ""), read)
        read += message["role"] != "assistant"


def _texts(task: Task, messages: list[Message]) -> Iterator[str]:
    """What an agent reads, in order."""
    yield task.system
    for message in [*task.messages, *(one for one in messages if one["role"] != "assistant")]:
        yield str(message.get("content") or "")


def _was_read(write: Write, text: str) -> bool:
    return all(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) for value in _values(json.loads(write.arguments)))


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _values(item)
    else:
        yield value.casefold() if isinstance(value, str) else json.dumps(value)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
