"""Check fidelity to the target: the same tools, policy and forms of answers and errors, tolerance of malformed calls.

An agent in training misspells tools and breaks JSON; an environment that fails on such a call loses the rollout. The
evidence names the tools that deviate, and the first calls and replies that do.
"""

import json
import random
import re
from collections.abc import Collection
from dataclasses import dataclass

from sandbox.admission.context import CheckContext, gather_all, with_seed_note
from sandbox.admission.policies import call, guess, required_arguments, say, tool_name, visible_values
from sandbox.admission.target_texts import odd_answers, policy_share, tool_answers
from sandbox.contract import Message, Task, Tool
from sandbox.errors import clipped
from store.types import INFERRED

JUNK_SEEDS = 6


async def interface(context: CheckContext) -> tuple[bool, dict[str, object]]:
    """Check that tools, policy, answers and errors are the target's, and that every call gets one reply."""
    plays = await context.oracle_plays(context.thresholds.seeds)
    tools = {tool["function"]["name"]: tool for play in plays for tool in play.task.tools}
    target_tools = (
        tools if context.target_tools is None else {tool["function"]["name"]: tool for tool in context.target_tools}
    )
    foreign = sorted(name for name in tools if name not in target_tools)
    changed = sorted(
        name for name, tool in tools.items() if name in target_tools and not is_same_tool(tool, target_tools[name])
    )
    unanswered = [
        complaint for play in plays for turn in play.turns for complaint in call_complaints(turn.message, turn.replies)
    ]
    junk = await gather_all(with_seed_note(seed, _play_junk(context, seed)) for seed in context.panel(JUNK_SEEDS))
    unanswered += [complaint for episode in junk for complaint in episode[0]]
    odd = odd_errors([failure for episode in junk for failure in episode[1]], context.target_error_examples)
    texts, thresholds = context.target_texts, context.thresholds
    error_forms = {error_form(example) for example in context.target_error_examples}
    answers = [answer for play in plays for turn in play.turns for answer in tool_answers(turn.message, turn.replies)]
    strange = odd_answers(
        [(name, text) for name, text in answers if error_form(text) not in error_forms], texts.answers
    )
    policy = sum(policy_share(play.task.system, texts.prompts) for play in plays) / len(plays) if plays else 0.0
    evidence: dict[str, object] = {"tools": len(tools), "foreign": foreign, "changed": changed}
    evidence |= {"unanswered": unanswered[:3], "odd_errors": odd[:3], "junk_seeds": JUNK_SEEDS}
    if texts.prompts:
        evidence |= {"policy": policy, "policy_required": thresholds.policy_share}
    if odd:
        evidence["error_examples"] = [clipped(text, 80) for text in context.target_error_examples[:3]]
    if texts.answers:
        evidence["odd_answers"] = strange[:3]
    if context.target_tools is None:
        evidence["target"] = "not compared: no target was given"
    elif not context.target_error_examples:
        evidence["error_form"] = "not compared: the target showed no error"
    has_policy = not texts.prompts or policy >= thresholds.policy_share
    return bool(tools) and has_policy and not (foreign or changed or unanswered or odd or strange), evidence


def is_same_tool(tool: Tool, target_tool: Tool) -> bool:
    """Return whether an environment's tool is the target's.

    Marks (keys that begin with "x-") are no part of a definition. The description of a tool whose schema was inferred
    from recorded calls is not the target's, so that an environment may describe it better.
    """
    ignored = {"description"} if target_tool.get(INFERRED) else set()
    return _definition(tool, ignored) == _definition(target_tool, ignored)


def _definition(tool: Tool, ignored: Collection[str]) -> Tool:
    function = {key: value for key, value in tool["function"].items() if key not in ignored and not _is_mark(key)}
    return {key: value for key, value in tool.items() if not _is_mark(key)} | {"function": function}


def _is_mark(key: str) -> bool:
    return key.startswith("x-")


def call_complaints(message: Message, replies: list[Message]) -> list[str]:
    """Return what is wrong with the replies to a message: every call id needs exactly one reply, in any order."""
    call_ids = sorted(str(item["id"]) for item in message.get("tool_calls") or [])
    answered_ids = sorted(str(reply["tool_call_id"]) for reply in replies if reply["role"] == "tool")
    return [] if call_ids == answered_ids else [f"calls {call_ids} got answers to {answered_ids}"]


@dataclass(frozen=True)
class FailedCall:
    """An invalid call, as text, and the reply to it, which must be an error."""

    call: str
    reply: str


async def _play_junk(context: CheckContext, seed: int) -> tuple[list[str], list[FailedCall]]:
    """Play one episode with malformed messages and return (complaints, calls that must fail)."""
    episode = context.source.episode()
    complaints: list[str] = []
    failures: list[FailedCall] = []
    try:
        task = await episode.reset(seed)
        for message, must_fail in junk_messages(task, seed):
            step = await episode.step(message)
            complaints += call_complaints(message, step.messages)
            if must_fail:
                function = message["tool_calls"][0]["function"]
                text = f"{function['name']}({function['arguments']})"
                failures += [FailedCall(text, reply["content"]) for reply in step.messages if reply["role"] == "tool"]
            if step.done:
                break
        await episode.score()
        return complaints, failures
    finally:
        await episode.close()


def junk_messages(task: Task, seed: int) -> list[tuple[Message, bool]]:
    """Return malformed messages, each with whether every reply to it must be an error."""
    rng = random.Random(seed)
    candidates = [tool for tool in task.tools if required_arguments(tool)]
    if not candidates:
        return [(call(0, ("no_such_tool", "{}")), True), (say(""), False)]
    tool = rng.sample(candidates, 1)[0]
    name = tool_name(tool)
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


def odd_errors(failures: list[FailedCall], examples: list[str]) -> list[str]:
    """Return the invalid calls whose replies are no errors in the target's form, one for each reply."""
    forms = {error_form(example) for example in examples}
    odd = {item.reply: item for item in failures if forms and error_form(item.reply) not in forms}
    return [f"{clipped(item.call, 80)} is answered with {clipped(reply, 80)!r}" for reply, item in odd.items()]


def error_form(text: str) -> tuple[str, ...]:
    """Return the form of a reply: an object's keys, the type of other JSON, or how a plain text begins ("error:")."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ("text", "".join(re.findall(r"^\W*\w+\W?", text)).strip().lower())
    return ("object", *sorted(value)) if isinstance(value, dict) else (type(value).__name__,)
