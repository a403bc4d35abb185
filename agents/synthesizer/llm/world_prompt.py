"""Builds the prompts that request a module of tool functions for a world, and its repair.

A sample of conversations is shown as their tool calls: of each, the answers that came before a call are what its answer
may rest on. Equal inputs give equal bytes. The caller passes only what a model may see.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from agents.llm.endpoint import estimated_tokens
from agents.llm.question import IS_DATA, ChatMessage, delimited
from agents.synthesizer.llm.shapes import clipped
from agents.synthesizer.llm.world_summary import world_text
from agents.world.calls import AnsweredCall, Conversation
from store.text import replace_surrogates
from store.types import Tool

# Characters of an answer, and of the arguments of a call.
MAX_ANSWER = 2_500
MAX_ARGUMENTS = 2_000
# Mismatches sent back, and of one tool.
MAX_MISMATCHES = 40
MAX_OF_TOOL = 4
MAX_REPORT = 24_000


@dataclass(frozen=True)
class ShownConversation:
    """A conversation that a model may see, and for each of its calls whether the world without a model answers it."""

    conversation: Conversation
    is_answered: Sequence[bool]


@dataclass(frozen=True)
class Mismatch:
    """A shown call whose answer in the world differs from the recorded one, or whose function failed.

    Attributes:
        answer: The world's answer; "" if it gave none.
        fault: What the function raised.
    """

    call: AnsweredCall
    answer: str
    fault: str = ""


def functions_request(
    policies: Sequence[str],
    tools: Sequence[Tool],
    world: Mapping[str, Any],
    visible: Sequence[ShownConversation],
    *,
    sample_tokens: int,
    largest: int,
) -> tuple[ChatMessage, ...]:
    """Return the dialogue that requests the module.

    Args:
        world: The data of a world that is made of the shown conversations only.
        sample_tokens: The most that the calls of conversations may have together.
        largest: The most bytes of the module.
    """
    system = f"{_prompt_text().replace('{bytes}', str(largest // 1024))}\n\n{IS_DATA}"
    sample = [_conversation_text(number, item) for number, item in enumerate(_sample(visible, sample_tokens))]
    parts = [
        "# The policy of the agent that calls the tools",
        *([_delimited("policy", text) for text in policies] or ["None was recorded."]),
        "# The tools",
        _delimited("tools", "\n".join(map(_json, tools))),
        "# What is recorded: of each tool some calls, and the values in its answers",
        _delimited("records", world_text(world)),
        "# How many calls have no answer",
        _delimited("open calls", _open_text(visible)),
        "# Tool calls of conversations, in their order",
        *(_delimited("conversation", text) for text in sample),
        "# Your answer",
        "Answer with the whole module in one ```python fence and nothing else.",
    ]
    return (ChatMessage("system", system), ChatMessage("user", "\n\n".join(parts)))


def functions_repair(
    request: Sequence[ChatMessage], module: str, refusals: Sequence[str], mismatches: Sequence[Mismatch]
) -> tuple[ChatMessage, ...]:
    """Return the dialogue that requests another module: the first request, the module, and what was wrong with it.

    Args:
        refusals: Why the module cannot be used at all.
        mismatches: Shown calls that it answered wrongly.
    """
    parts = ["The module was tried on the conversations that you may see."]
    if refusals:
        parts += ["It cannot be used:", _delimited("refusals", "\n".join(refusals))]
    if mismatches:
        counts = Counter(item.call.tool for item in mismatches)
        lines = [_json({"wrong answers": dict(counts)})]
        shown_counts: Counter[str] = Counter()
        for item in mismatches:
            shown_counts[item.call.tool] += 1
            if shown_counts[item.call.tool] <= MAX_OF_TOOL and len(lines) <= MAX_MISMATCHES:
                lines.append(_mismatch_text(item))
        text = clipped("\n".join(lines), MAX_REPORT)
        parts += ["These calls were answered otherwise than by the target, or their function failed:"]
        parts.append(_delimited("mismatches", text))
    parts.append(
        "Correct the functions; where the answer does not follow from what is known, raise NotRecorded instead. "
        "Answer with the whole module in one ```python fence and nothing else."
    )
    return (
        *request,
        ChatMessage("assistant", f"```python\n{replace_surrogates(module).strip()}\n```"),
        ChatMessage("user", "\n\n".join(parts)),
    )


def _sample(visible: Sequence[ShownConversation], tokens: int) -> list[ShownConversation]:
    """Return the conversations that show most open calls of tools that few others show, for their length."""
    texts = {item.conversation.id: _conversation_text(0, item) for item in visible}
    costs = {key: estimated_tokens(text) for key, text in texts.items()}
    counts: Counter[str] = Counter()
    calls: set[tuple[str, str]] = set()
    sample: list[ShownConversation] = []
    remaining = list(visible)

    def gain(item: ShownConversation) -> float:
        # Half as much for each further call of a tool that is shown already; equal calls count once.
        tools = {(call.tool, call.key): call.tool for call in _open_calls(item)}
        tool_counts, total = Counter(counts), 0.0
        for call, tool in tools.items():
            if call not in calls:
                total += 0.5 ** tool_counts[tool]
                tool_counts[tool] += 1
        return total / costs[item.conversation.id]

    while remaining:
        best = max(remaining, key=gain)
        remaining.remove(best)
        if gain(best) <= 0:
            break
        if costs[best.conversation.id] > tokens:
            continue
        tokens -= costs[best.conversation.id]
        sample.append(best)
        for call in _open_calls(best):
            if (call.tool, call.key) not in calls:
                calls.add((call.tool, call.key))
                counts[call.tool] += 1
    return sample


def _open_calls(item: ShownConversation) -> list[AnsweredCall]:
    pairs = zip(item.conversation.calls, item.is_answered, strict=True)
    return [call for call, is_answered in pairs if not is_answered]


def _open_text(visible: Sequence[ShownConversation]) -> str:
    """Return for each tool with open calls their number and that of all its calls."""
    calls = Counter(call.tool for item in visible for call in item.conversation.calls)
    open_calls = Counter(call.tool for item in visible for call in _open_calls(item))
    return "\n".join(
        _json({"tool": tool, "calls": calls[tool], "open": count}) for tool, count in sorted(open_calls.items())
    )


def _conversation_text(number: int, item: ShownConversation) -> str:
    lines = [f"conversation c{number:02d}"]
    for call, is_answered in zip(item.conversation.calls, item.is_answered, strict=True):
        lines.append(_call_text(call) if is_answered else _call_text(call, open=True))
    return "\n".join(lines)


def _call_text(call: AnsweredCall, **marks: object) -> str:
    return _json(
        {
            "call": call.tool,
            "arguments": clipped(_json(call.arguments), MAX_ARGUMENTS),
            ("error" if call.failed else "answer"): clipped(call.text, MAX_ANSWER),
            **marks,
        }
    )


def _mismatch_text(item: Mismatch) -> str:
    marks = {"your world": clipped(item.answer, MAX_ANSWER)} if item.answer else {}
    return _call_text(item.call, **marks, **({"your function raised": item.fault} if item.fault else {}))


def _delimited(name: str, text: str) -> str:
    return delimited(name, replace_surrogates(text))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _prompt_text() -> str:
    return files("agents.synthesizer.llm").joinpath("prompts/world_functions.md").read_text("utf-8").strip()
