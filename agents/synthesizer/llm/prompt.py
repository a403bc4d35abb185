"""Builds the prompts that request an environment file, or the repair of one.

Equal inputs give equal bytes, because stored replies are found by the prompt's hash. Text of users, tools, analysts and
environments stands between marks, and the text outside the marks does not depend on it. Of a trajectory only messages
and tools are used; conversations are numbered ("t03"), because their ids may reveal tasks. The caller gives the checks
that a file must pass (``Rules``). Policies, tools, the example, and one failure and one success (``example_pair``) are
whole, the other parts are clipped; the prompt without that pair may exceed a model's context.
"""

import inspect
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product

from agents.llm.endpoint import estimated_tokens
from agents.llm.question import IS_DATA, ChatMessage, delimited
from agents.synthesizer.builtin import WorldData, majority
from agents.synthesizer.llm.answer import holds_environment
from agents.synthesizer.llm.shapes import clipped, merged, shape
from agents.synthesizer.llm.target_block import POLICIES, TOOLS
from agents.synthesizer.llm.world_summary import world_text
from agents.transcript import Call, message_text, tool_function, transcripts
from agents.world.errors import error_class
from sandbox import contract
from store.text import replace_surrogates
from store.types import Capability, Label, Message, Outcome, Tool, Trajectory, Verdict

# System messages shown; they may differ from task to task.
MAX_POLICIES = 3
# Answers shown of one tool that differ in their fields.
MAX_RESULTS = 2
# Errors shown of one tool, of different classes.
MAX_ERRORS = 5
# In characters, as all limits without another unit.
MAX_ANSWER = 1_500
# Failures shown.
MAX_SPANS = 6
# Messages shown around the one that decided a label.
MESSAGES_BEFORE, MESSAGES_AFTER = 4, 2
MAX_MESSAGE = 700
# A shorter excerpt of a message says nothing.
MIN_MESSAGE = 120
MAX_ARGUMENTS = 1_000
# Limit for a refused file that is sent back: that of admission, so that every file that it can accept is whole.
MAX_SOURCE = 256 * 1024
MAX_REPORT = 12_000
# Limit for one text of a capability.
MAX_TEXT = 1_000


def frequent_policies(trajectories: Iterable[Trajectory]) -> list[str]:
    """Return the most frequent system messages, each once and whole, at most ``MAX_POLICIES``."""
    return [text for text, _ in _policy_counts(trajectories).most_common(MAX_POLICIES)]


def _policy_counts(trajectories: Iterable[Trajectory]) -> Counter[str]:
    return Counter(
        conversation.system for conversation in transcripts(list(trajectories)) if conversation.system.strip()
    )


def target_tools(trajectories: Iterable[Trajectory]) -> list[Tool]:
    """Return every tool's schema, in order of first appearance."""
    tools: dict[str, Tool] = {}
    for trajectory in trajectories:
        for tool in trajectory.tools:
            tools.setdefault(str(tool_function(tool).get("name", "")), tool)
    return list(tools.values())


def tool_text(trajectories: Iterable[Trajectory]) -> str:
    """Return every tool's schema, one per line, in order of first appearance."""
    return "\n".join(map(_json, target_tools(trajectories)))


def state_text(trajectories: Iterable[Trajectory]) -> str:
    """Return for each tool the fields of its answers, then some answers and errors as recorded, one per line."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for conversation in transcripts(list(trajectories)):
        for call in conversation.calls:
            if call.result is not None:
                calls[call.name].append(call)
    return "\n".join(line for name, tool_calls in calls.items() for line in _tool_lines(name, tool_calls))


def _tool_lines(name: str, calls: list[Call]) -> Iterator[str]:
    fields: object = None
    shapes: dict[str, Call] = {}
    errors: dict[str, Call] = {}
    for call in calls:
        if call.result is None:
            continue
        if call.result.error:
            errors.setdefault(error_class(call.result.text), call)
            continue
        answer_shape = shape(call.result.value)
        fields = answer_shape if fields is None else merged(fields, answer_shape)
        shapes.setdefault(_json(answer_shape), call)
    if fields is not None:
        yield _json({"tool": clipped(name, 80), "answers": fields})
    for call in [*list(shapes.values())[:MAX_RESULTS], *list(errors.values())[:MAX_ERRORS]]:
        answer = call.result.text if call.result is not None else ""
        yield _json(
            {"call": clipped(name, 80), "arguments": clipped(call.raw, MAX_ARGUMENTS)}
            | {"answer": clipped(answer, MAX_ANSWER)}
        )


def failure_texts(trajectories: Sequence[Trajectory], labels: Iterable[Label], capability: str) -> list[str]:
    """Return, for some failures that lacked the capability, the messages around the one that decided the label."""
    citations: dict[str, Counter[int]] = defaultdict(Counter)
    labels = list(labels)
    for label in labels:
        if label.capability == capability and label.verdict is Verdict.LACKING and label.message_index is not None:
            citations[label.trajectory_id][label.message_index] += 1
    verdicts = majority(labels, capability)
    lacking_failures = [
        (number, trajectory)
        for number, trajectory in enumerate(trajectories)
        if trajectory.outcome is Outcome.FAILURE and verdicts.get(trajectory.id) is Verdict.LACKING
    ]
    step = max(1, len(lacking_failures) // MAX_SPANS)
    return [
        _span(number, trajectory, _deciding_message(citations[trajectory.id]), _reason(labels, capability, trajectory))
        for number, trajectory in lacking_failures[::step][:MAX_SPANS]
    ]


def _reason(labels: Iterable[Label], capability: str, trajectory: Trajectory) -> dict[str, str]:
    """Return why a trajectory lacks a capability and the sentence of the policy that it broke, if they were given."""
    for label in labels:
        is_of_trajectory = (label.trajectory_id, label.capability) == (trajectory.id, capability)
        if is_of_trajectory and label.verdict is Verdict.LACKING and label.reason:
            return {"why": label.reason} | ({"broken rule": label.policy} if label.policy else {})
    return {}


def _deciding_message(votes: Mapping[int, int]) -> int | None:
    """Return the message that most runs cited, the earliest of several, None without votes."""
    return min(votes, key=lambda index: (-votes[index], index), default=None)


def _span(number: int, trajectory: Trajectory, deciding: int | None, reason: Mapping[str, str]) -> str:
    """Return the first user message and the messages around ``deciding``, or the last ones if no run cited any."""
    last = len(trajectory.messages) - 1
    middle = last if deciding is None else min(deciding, last)
    opening_index = next((n for n, message in enumerate(trajectory.messages) if message.get("role") == "user"), 0)
    indices = sorted({opening_index, *range(max(0, middle - MESSAGES_BEFORE), min(last, middle + MESSAGES_AFTER) + 1)})
    lines = [f"conversation t{number:02d}, {last + 1} messages, of which these", *([_json(reason)] if reason else [])]
    for index in indices:
        message = trajectory.messages[index]
        if message.get("role") not in ("system", "developer"):
            lines.append(
                _json({"m": index, **public(message), **({"lacking here": True} if index == deciding else {})})
            )
    return "\n".join(lines)


@dataclass(frozen=True)
class ExamplePair:
    """A failure and a success in full, as text, and the number of characters that did not fit."""

    texts: tuple[str, ...] = ()
    omitted: int = 0


NO_PAIR = ExamplePair()


def example_pair(
    trajectories: Sequence[Trajectory], labels: Sequence[Label], capability: str, tokens: int
) -> ExamplePair:
    """Return a failure that lacked the capability and a success that exercised it, of one task if possible.

    Args:
        tokens: the most that both may have together; if they have more, the longest messages are clipped.
    """
    verdicts = majority(labels, capability)
    numbered = list(enumerate(trajectories))
    failures = [
        entry
        for entry in numbered
        if entry[1].outcome is Outcome.FAILURE and verdicts.get(entry[1].id) is Verdict.LACKING
    ]
    successes = [
        entry
        for entry in numbered
        if entry[1].outcome is Outcome.SUCCESS and verdicts.get(entry[1].id) is Verdict.PRESENT
    ]
    # Of one task first; within a task and otherwise in the order of the trajectories.
    pairs = sorted(
        product(failures, successes),
        key=lambda pair: (pair[0][1].source, pair[0][1].task_id) != (pair[1][1].source, pair[1][1].task_id),
    )
    entries = pairs[0] if pairs else tuple(failures[:1] or successes[:1])
    limit = max((len(message_text(message)) for _, item in entries for message in item.messages), default=0)
    full_size = sum(len(_conversation(*entry, limit)) for entry in entries)
    while limit > MIN_MESSAGE and estimated_tokens("".join(_conversation(*entry, limit) for entry in entries)) > tokens:
        limit = max(limit * 3 // 4, MIN_MESSAGE)
    texts = tuple(_conversation(*entry, limit) for entry in entries)
    if estimated_tokens("".join(texts)) > tokens:
        return ExamplePair((), full_size)
    return ExamplePair(texts, full_size - sum(map(len, texts)))


def _conversation(number: int, trajectory: Trajectory, limit: int) -> str:
    """Return a conversation without its system message; texts and arguments have at most ``limit`` characters."""
    outcome = "success" if trajectory.outcome is Outcome.SUCCESS else "failure"
    lines = [f"conversation t{number:02d}, a {outcome}"]
    for index, message in enumerate(trajectory.messages):
        if message.get("role") not in ("system", "developer"):
            lines.append(_json({"m": index, **public(message, limit, limit)}))
    return "\n".join(lines)


def public(message: Message, text_limit: int = MAX_MESSAGE, argument_limit: int = MAX_ARGUMENTS) -> dict[str, object]:
    """Return the fields of a message that a chat shows: role, text and calls."""
    calls = message.get("tool_calls")
    fields = {
        "role": clipped(str(message.get("role")), 20),
        "content": clipped(message_text(message), text_limit),
        "calls": [_call(call, argument_limit) for call in calls if isinstance(call, dict)]
        if isinstance(calls, list)
        else [],
    }
    return {key: value for key, value in fields.items() if value}


def _call(call: Mapping[str, object], limit: int) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    raw = function.get("arguments", "")
    arguments = clipped(raw if isinstance(raw, str) else _json(raw), limit)
    return f"{clipped(str(function.get('name', '')), 80)}({arguments})"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Rules:
    """What a file is checked for: check -> its meaning in words. The contract's text names the permitted imports."""

    checks: Mapping[str, str]
    # The most bytes that a model's file may have, beside what is put above it.
    largest: int
    # Whether the file may ask for a user that is a model.
    has_user_model: bool = False
    # Of an episode in the training: assistant messages, tokens in all, tokens of one message; None if unknown.
    budget: tuple[int, int, int] | None = None
    # The most tokens that an answer may have, reasoning included; 0 if unknown.
    answer_tokens: int = 0


@dataclass(frozen=True)
class RefusedFile:
    """A refused file, and the text of the report on it."""

    source: str
    report: str


def request_messages(
    capability: Capability,
    trajectories: Sequence[Trajectory],
    labels: Sequence[Label],
    rules: Rules,
    *,
    pair: ExamplePair = NO_PAIR,
    target_world: WorldData | None = None,
) -> tuple[ChatMessage, ...]:
    """Return the dialogue that requests a first file, over the target's world if there is one."""
    fields = {
        "name": capability.name,
        "title": capability.title,
        "description": capability.description,
        "when it is needed": capability.when_needed,
        "what exercising it looks like": capability.exercised,
        "what lacking it looks like": capability.lacking,
    }
    texts = "\n".join(f"{field}: {clipped(text, MAX_TEXT)}" for field, text in fields.items() if text.strip())
    policies = [_delimited("policy", text) for text in frequent_policies(trajectories)]
    further = len(_policy_counts(trajectories)) - len(policies)
    failed = [_delimited("failure", text) for text in failure_texts(trajectories, labels, capability.name)]
    parts = [
        "# The capability",
        _delimited("capability", texts),
        f"# The target: its policy, as its agents are told it ({POLICIES}; it may differ from task to task)",
        *(policies or ["None was recorded."]),
        *([f"{further} further, less frequent ones are not shown."] if further > 0 else []),
        f"# The target: its tools ({TOOLS})",
        _delimited("tools", tool_text(trajectories)),
        "# The target: the state behind its tools, as their answers show it",
        _delimited("answers", state_text(trajectories)),
        *(_world_parts(target_world) if target_world else []),
        "# What happened where the capability was lacking",
        *(failed or ["No conversation can be shown."]),
        *(["# Whole conversations", *(_delimited("conversation", text) for text in pair.texts)] if pair.texts else []),
        "# The contract (sandbox/contract.py)",
        f"```python\n{inspect.getsource(contract).strip()}\n```",
        "# Rewards, scenarios, fidelity",
        _prompt_text("rewards"),
        *([_prompt_text("user")] if rules.has_user_model else []),
        "# What the file is checked for",
        _check_list(rules),
        *([_budget_text(*rules.budget)] if rules.budget else []),
        "# An example: another capability of another target",
        f"```python\n{example().strip()}\n```",
        "# Your answer",
        _answer_text(rules),
    ]
    return (ChatMessage("system", f"{_prompt_text('system')}\n\n{IS_DATA}"), ChatMessage("user", "\n\n".join(parts)))


def repair_messages(
    request: Sequence[ChatMessage], base: RefusedFile, follow_up: RefusedFile | None, earlier_failures: Sequence[str]
) -> tuple[ChatMessage, ...]:
    """Return the dialogue ``request`` continued with the refused file ``base`` and the report on it.

    Args:
        follow_up: a later answer to ``base`` that contained no file.
        earlier_failures: for each earlier attempt, oldest first, the checks that refused it.
    """
    parts = [_prompt_text("mend"), _delimited("report", clipped(base.report, MAX_REPORT))]
    if follow_up is not None:
        parts += [
            "Asked to mend it, you answered without a file that defines Environment:",
            _delimited("answer", clipped(follow_up.source, MAX_TEXT)),
            _delimited("report", clipped(follow_up.report, MAX_REPORT)),
        ]
    if earlier_failures:
        attempts = "\n".join(f"{number}. refused by {checks}" for number, checks in enumerate(earlier_failures, 1))
        parts.append(f"Attempts before this one, the oldest first; do not go back to what they did:\n{attempts}")
    parts.append(_prompt_text("answer"))
    source = clipped(base.source.strip(), MAX_SOURCE)
    file = f"```python\n{source}\n```" if holds_environment(source) else source
    return (*request, ChatMessage("assistant", file), ChatMessage("user", "\n\n".join(parts)))


def example() -> str:
    """Return the source of the example environment, which is read as text and never imported."""
    return files("agents.synthesizer.llm").joinpath("example.py").read_text("utf-8")


def _delimited(name: str, text: str) -> str:
    """Return untrusted text between marks, in valid Unicode."""
    return delimited(name, replace_surrogates(text))


def _world_parts(target_world: WorldData) -> list[str]:
    records = _delimited("records", world_text(target_world.data))
    parts = ["# The target: its world", _prompt_text("world"), records]
    if target_world.omitted:
        names = _delimited("omitted tools", json.dumps(target_world.omitted, ensure_ascii=False))
        parts.append(f"The world answers no call of these tools; a scenario's solution needs none of them:\n\n{names}")
    return parts


def _answer_text(rules: Rules) -> str:
    limit = f" Your answer has at most {rules.answer_tokens} tokens, reasoning included." if rules.answer_tokens else ""
    return f"{_prompt_text('answer')}{limit}"


def _budget_text(turns: int, tokens: int, message_tokens: int) -> str:
    return (
        f"# The budget of an episode\n\nAn episode of the training ends after {turns} messages of the agent, or when "
        f"system message, tools, messages and answers together have {tokens} tokens; one message of the agent has at "
        f"most {message_tokens} tokens. The oracle's play of every seed has to fit, by the tokens of the model that is "
        "trained. Leave a third of the budget free: an agent that learns takes detours."
    )


def _check_list(rules: Rules) -> str:
    lines = "\n".join(f"- {name}: {meaning}" for name, meaning in rules.checks.items())
    return f"{lines}\n\nThe file has at most {rules.largest // 1024} KiB; records are drawn, not listed."


def _prompt_text(name: str) -> str:
    return files("agents.synthesizer.llm").joinpath(f"prompts/{name}.md").read_text("utf-8").strip()
