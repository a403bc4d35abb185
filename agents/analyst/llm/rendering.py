"""Renders trajectories as text for a model, and cleans text from a model.

A message starts a line, ``m4 agent: ...``; its further lines are indented, so no text can imitate a message. If a
conversation does not fit, long messages first lose their middle. Then whole messages are dropped: first those in the
middle, then tool errors, last those at the beginning and the end. Omissions are marked, and dropped messages cannot be
cited. Only messages and tools are read, never ``parts``, ``task_id``, a reward or a trajectory's id. Images and audio
are skipped.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.language import stem
from agents.llm.question import delimited
from agents.transcript import Transcript, tool_function, transcript
from store.types import Trajectory

# Gives more tokens than tokenizers produce for English, and about as many as they produce for JSON.
BYTES_PER_TOKEN = 3
# Messages are clipped to this size before whole messages are dropped.
MIN_MESSAGE_BYTES = 240
# Messages at either end that are dropped last.
HEAD_MESSAGES, TAIL_MESSAGES = 3, 6
GAP_MARK = "[...]"
# Two to five words: a capability's name becomes part of adapter names and paths, and model names are single words.
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){1,4}")
LONGEST_NAME = 60
# The baseline that a cycle compares its adapters with.
RESERVED_NAMES = frozenset({"grpo-on-target"})
_STOP_WORDS = frozenset({"a", "an", "and", "before", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, and the indices of the messages that may be cited."""

    text: str
    messages: frozenset[int]

    def message_index(self, citation: str) -> int | None:
        """Return the message index of a citation such as "m4"; None if that message was not shown."""
        number = citation.strip().removeprefix("m")
        index = int(number) if number.isdecimal() and len(number) < 8 else -1
        return index if index in self.messages else None


@dataclass(frozen=True)
class _Line:
    index: int
    text: str
    error: bool = False


def token_estimate(text: str) -> int:
    """Return an upper estimate of the tokens in a text."""
    return -(-len(_bytes(text)) // BYTES_PER_TOKEN)


def render_conversation(trajectory: Trajectory, budget: int) -> RenderedConversation:
    """Render a conversation without policy and tools, in at most ``budget`` tokens."""
    lines = _lines(transcript(trajectory))
    byte_budget = budget * BYTES_PER_TOKEN
    limit = max((len(_bytes(line.text)) for line in lines), default=0)
    while limit > MIN_MESSAGE_BYTES and _size(lines, limit) > byte_budget:
        limit = max(limit * 3 // 4, MIN_MESSAGE_BYTES)
    fits = _size(lines, limit) <= byte_budget
    selected = set(range(len(lines))) if fits else _selected_lines(lines, limit, byte_budget)
    output: list[str] = []
    for position, line in enumerate(lines):
        if position in selected:
            output.append(_clip(line.text, limit))
        elif position == 0 or position - 1 in selected:
            output.append(GAP_MARK)
    return RenderedConversation("\n".join(output), frozenset(lines[position].index for position in selected))


def render_policy_and_tools(trajectories: Sequence[Trajectory], budget: int) -> str:
    """Render the agents' system prompts and tools, each once, between marks, in at most ``budget`` tokens."""
    conversations = [transcript(trajectory) for trajectory in trajectories]
    policies = list(
        dict.fromkeys(conversation.system.strip() for conversation in conversations if conversation.system.strip())
    )
    tool_lists = list(
        dict.fromkeys(
            json.dumps(conversation.tools, sort_keys=True) for conversation in conversations if conversation.tools
        )
    )
    tools = [line for tool_list in tool_lists for line in map(_tool_line, json.loads(tool_list))]
    byte_budget = budget * BYTES_PER_TOKEN // 2
    parts = []
    if policies:
        parts.append(delimited("policy", _clip("\n\n".join(policies), byte_budget)))
    if tools:
        parts.append(delimited("tools", _clip("\n".join(dict.fromkeys(tools)), byte_budget)))
    return "\n".join(parts)


def _lines(conversation: Transcript) -> list[_Line]:
    """Return a line for every text, call and answer, in message order."""
    lines = [_Line(message.index, _line(message.index, "user", message.text)) for message in conversation.user]
    lines += [_Line(message.index, _line(message.index, "agent", message.text)) for message in conversation.agent]
    for call in conversation.calls:
        is_error = call.result is not None and call.result.error
        lines.append(_Line(call.index, _line(call.index, "agent calls", f"{call.name}({call.raw})"), is_error))
        if call.result is not None:
            message = _line(call.result.index, f"{call.name} answers", call.result.text)
            lines.append(_Line(call.result.index, message, is_error))
    return sorted(lines, key=lambda line: line.index)


def _line(index: int, speaker: str, text: str) -> str:
    return _indented(f"m{index} {' '.join(speaker.split())}: {text}")


def _indented(text: str) -> str:
    """Return a text with all lines indented except the first."""
    return "\n    ".join(_bytes(text).decode().splitlines())


def _tool_line(tool: object) -> str:
    function = tool_function(tool) if isinstance(tool, dict) else {}
    parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False)
    return _indented(f"{function.get('name', '')}: {function.get('description', '')} {parameters}")


def _selected_lines(lines: Sequence[_Line], limit: int, byte_budget: int) -> set[int]:
    """Return the positions of as many lines as fit: the opening, both ends, errors, then backwards from the end."""

    def weight(position: int) -> tuple[int, int]:
        if position == 0:
            return 0, 0
        at_an_end = position < HEAD_MESSAGES or position >= len(lines) - TAIL_MESSAGES
        return (1 if at_an_end else 2 if lines[position].error else 3), -position

    selected: set[int] = set()
    for position in sorted(range(len(lines)), key=weight):
        size = _size([lines[position]], limit) + len(GAP_MARK) + 1
        if size <= byte_budget:
            selected.add(position)
            byte_budget -= size
    return selected


def _size(lines: Sequence[_Line], limit: int) -> int:
    return sum(min(len(_bytes(line.text)), limit) + 1 for line in lines)


def _clip(text: str, limit: int) -> str:
    """Return at most ``limit`` bytes of a text, two thirds from its beginning and one third from its end."""
    encoded = _bytes(text)
    if len(encoded) <= limit:
        return text
    missing = f" [... {len(encoded) - limit} bytes left out ...] "
    byte_budget = max(limit - len(missing), 0)
    head, tail = encoded[: byte_budget * 2 // 3], encoded[len(encoded) - byte_budget // 3 :]
    return head.decode("utf-8", "ignore") + missing + tail.decode("utf-8", "ignore")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def one_line(text: str, limit: int) -> str:
    """Return a text on one line, without control characters, cut to ``limit`` characters."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def is_name(text: str) -> bool:
    """Return whether a text may be the name of a capability."""
    return len(text) <= LONGEST_NAME and NAME.fullmatch(text) is not None and text not in RESERVED_NAMES


def as_name(text: str) -> str:
    """Return a valid capability name made of the first five words of a model's text, empty if that is not possible."""
    words = re.findall(r"[a-z0-9]+", text.lower())[:5]
    name = "-".join(words)
    return name if is_name(name) else ""


def is_same_name(first: str, other: str) -> bool:
    """Return whether two names differ only in word order, word forms, stop words and hyphens."""
    return _name_stems(first) == _name_stems(other) or first.replace("-", "") == other.replace("-", "")


def _name_stems(name: str) -> frozenset[str]:
    return frozenset(stem(word) for word in name.split("-") if word not in _STOP_WORDS)
