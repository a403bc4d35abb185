"""Fidelity to the target: the same tools, the same form of answer and error, and sense under a clumsy agent's calls.

An agent under training will misspell tools and break JSON; an environment must answer as the target does, for a fault
there would throw the rollout away. Evidence names the first tool, call or answer that deviates.
"""

import json
import random
import re
from typing import Any

from sandbox.admission.context import Bench, noting, together
from sandbox.admission.policies import call, guess, say, visible_values
from sandbox.contract import Message, Task, Tool
from sandbox.errors import clipped

SEEDS = 6


async def interface(bench: Bench) -> tuple[bool, dict[str, Any]]:
    """Tools are the target's own, every call gets its answer, errors have the target's form."""
    plays = await bench.oracle_plays(bench.thresholds.seeds)
    offered = {tool["function"]["name"]: tool for one in plays for tool in one.task.tools}
    known = offered if bench.target_tools is None else {tool["function"]["name"]: tool for tool in bench.target_tools}
    foreign = sorted(name for name in offered if name not in known)
    changed = sorted(name for name, tool in offered.items() if name in known and tool != known[name])
    unanswered = [
        complaint for one in plays for turn in one.turns for complaint in call_complaints(turn.message, turn.replies)
    ]
    junk = await together(noting(seed, _junk(bench, seed)) for seed in bench.panel(SEEDS))
    unanswered += [complaint for answered in junk for complaint in answered[0]]
    odd = _odd_errors([text for answered in junk for text in answered[1]], bench.target_error_examples)
    evidence: dict[str, Any] = {"tools": len(offered), "foreign": foreign, "changed": changed}
    evidence |= {"unanswered": unanswered[:3], "odd_errors": odd[:3], "junk_seeds": SEEDS}
    if bench.target_tools is None:
        evidence["target"] = "not compared: no target was given"
    elif not bench.target_error_examples:
        evidence["error_form"] = "not compared: the target showed no error"
    return bool(offered) and not (foreign or changed or unanswered or odd), evidence


def call_complaints(message: Message, replies: list[Message]) -> list[str]:
    """What is wrong with the answers to one assistant message's calls: each id exactly once, in any order."""
    asked = sorted(str(item["id"]) for item in message.get("tool_calls") or [])
    answered = sorted(str(reply["tool_call_id"]) for reply in replies if reply["role"] == "tool")
    return [] if asked == answered else [f"calls {asked} got answers to {answered}"]


async def _junk(bench: Bench, seed: int) -> tuple[list[str], list[str]]:
    """(complaints, texts of answers that must be errors) of one episode under a clumsy agent."""
    episode = bench.source.episode()
    complaints: list[str] = []
    errors: list[str] = []
    try:
        task = await episode.reset(seed)
        for message, must_fail in junk_messages(task, seed):
            step = await episode.step(message)
            complaints += call_complaints(message, step.messages)
            errors += [reply["content"] for reply in step.messages if reply["role"] == "tool" and must_fail]
            if step.done:
                break
        await episode.score()
        return complaints, errors
    finally:
        await episode.close()


def junk_messages(task: Task, seed: int) -> list[tuple[Message, bool]]:
    """A clumsy agent's messages, and whether every answer to them must be an error."""
    rng = random.Random(seed)
    tool = _needing_arguments(task.tools, rng)
    if tool is None:
        return [(call(0, ("no_such_tool", "{}")), True), (say(""), False)]
    name = str(tool["function"]["name"])
    values = visible_values(task, [])
    return [
        (call(0, ("no_such_tool", "{}")), True),
        (call(1, (name, "{not json")), True),
        (call(2, (name, "[]")), True),
        (call(3, (name, "{}")), True),
        (call(4, (name, json.dumps({"unexpected": [None, {"a": 1.5}]}))), True),
        (call(5, (name, guess(tool, values, rng)), (name, guess(tool, ["X0"], rng))), False),
        (say("\u2603 " * 50), False),
        (say(""), False),
    ]


def _needing_arguments(tools: list[Tool], rng: random.Random) -> Tool | None:
    return next(iter(rng.sample(needy, 1)), None) if (needy := [t for t in tools if _required(t)]) else None


def _required(tool: Tool) -> list[Any]:
    parameters = tool["function"]["parameters"]
    required = parameters.get("required")
    return required if isinstance(required, list) else []


def _odd_errors(texts: list[str], examples: list[str]) -> list[str]:
    forms = {error_form(example) for example in examples}
    return [clipped(text, 120) for text in dict.fromkeys(texts) if forms and error_form(text) not in forms]


def error_form(text: str) -> tuple[str, ...]:
    """An object's keys, or how a plain text begins ("Error:")."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ("text", "".join(re.findall(r"^\W*\w+\W?", text)).strip().lower())
    return ("object", *sorted(value)) if isinstance(value, dict) else (type(value).__name__,)
