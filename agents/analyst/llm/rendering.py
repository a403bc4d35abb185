"""Renders trajectories as text for a model, and cleans text from a model.

A message starts a line, ``m4 agent: ...``; its further lines are indented, so no text can imitate a message. The last
line, ``end: ...``, says how the conversation ended. If a conversation does not fit, long messages first lose their
middle. Then whole messages are dropped: first those in the middle, then tool errors, last those at the beginning and
the end. Omissions are marked and counted, and dropped messages cannot be cited. Only messages, tools and the cause of
the end are read, never ``parts``, ``task_id``, a reward or a trajectory's id. Images and audio are skipped.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.language import stem
from agents.llm.question import delimited
from agents.transcript import STOP_MARK, message_text, tool_function, transcript
from store.types import EndCause, Trajectory

# Gives more tokens than tokenizers produce for English, and about as many as they produce for JSON.
BYTES_PER_TOKEN = 3
# Messages are clipped to this size before whole messages are dropped.
MIN_MESSAGE_BYTES = 240
# Messages at either end that are dropped last.
HEAD_MESSAGES, TAIL_MESSAGES = 3, 6
GAP_MARK = "[...]"
# Nesting levels of a tool's parameters that are shown.
MAX_SCHEMA_DEPTH = 6
# A text between marks is longer by this.
MARK_BYTES = 60
# Characters; a shorter quotation occurs in every policy.
MIN_QUOTATION = 12
_CAUSES = {
    EndCause.MAX_TURNS: "the limit of turns was reached",
    EndCause.MAX_TOKENS: "the limit of tokens was reached",
    EndCause.ENGINE_ERROR: "an error of the agent's model",
    EndCause.SANDBOX_ERROR: "an error of the environment",
    EndCause.TARGET_ERROR: "an error of the environment",
    EndCause.SIMULATOR_ERROR: "an error of the user's model",
    EndCause.SILENCE: "no further message came",
}
# Two to five words: a capability's name becomes part of adapter names and paths, and model names are single words.
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){1,4}")
LONGEST_NAME = 60
# The baseline that a cycle compares its adapters with.
RESERVED_NAMES = frozenset({"grpo-on-target"})
_STOP_WORDS = frozenset({"a", "an", "and", "before", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation as text, the indices of the messages that may be cited, and the number of bytes left out."""

    text: str
    messages: frozenset[int]
    omitted_bytes: int = 0

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
    lines = _lines(trajectory)
    end = _indented(f"end: {ending(trajectory)}")
    byte_budget = budget * BYTES_PER_TOKEN - len(_bytes(end)) - 1
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
    shown_bytes = sum(min(len(_bytes(lines[position].text)), limit) for position in selected)
    omitted = sum(len(_bytes(line.text)) for line in lines) - shown_bytes
    messages = frozenset(lines[position].index for position in selected)
    return RenderedConversation("\n".join([*output, end]), messages, omitted)


def ending(trajectory: Trajectory) -> str:
    """Return how a conversation ended: a limit, an error or a silence, and what its last message was."""
    last = len(trajectory.messages) - 1
    message = trajectory.messages[last] if trajectory.messages else {}
    text, role = message_text(message), message.get("role")
    calls = transcript(trajectory).calls
    unanswered = [call.name for call in calls if call.result is None]
    if role == "user":
        mark = STOP_MARK.search(text)
        final = f"the user ended it with {mark.group()}" if mark else "the user wrote last"
    elif role == "tool":
        final_calls = [call for call in calls if call.result is not None and call.result.index == last]
        final = f"nothing followed the answer of {final_calls[0].name if final_calls else 'a tool'}"
        final += ", an error" if any(not call.succeeded for call in final_calls) else ""
    elif unanswered:
        final = f"the call of {unanswered[-1]} was never answered"
    else:
        final = "the agent wrote last" if role == "assistant" else "nobody wrote"
    cause = _CAUSES.get(trajectory.end_cause)
    place = f" (m{last})" if last > 0 else ""
    return " ".join((f"{cause}; {final}{place}" if cause else f"{final}{place}").split())


@dataclass(frozen=True)
class RenderedContext:
    """The policies and tools of some conversations as text between marks, and the number of bytes left out of each."""

    text: str
    omitted_policy: int = 0
    omitted_tools: int = 0


def render_policy_and_tools(trajectories: Sequence[Trajectory], budget: int) -> RenderedContext:
    """Render the agents' system prompts and tools, each once and whole, between marks.

    Only if they exceed ``budget`` tokens is the longer of the two cut, in its middle.
    """
    conversations = [transcript(trajectory) for trajectory in trajectories]
    policies = list(
        dict.fromkeys(conversation.system.strip() for conversation in conversations if conversation.system.strip())
    )
    tool_lists = list(
        dict.fromkeys(
            json.dumps(conversation.tools, sort_keys=True) for conversation in conversations if conversation.tools
        )
    )
    tools = dict.fromkeys(line for tool_list in tool_lists for line in map(_tool_line, json.loads(tool_list)))
    texts = {"policy": "\n\n".join(policies), "tools": "\n".join(tools)}
    sizes = {name: len(_bytes(text)) for name, text in texts.items()}
    byte_budget = max(budget * BYTES_PER_TOKEN - 2 * MARK_BYTES, 0)
    limits = dict(sizes)
    if sum(sizes.values()) > byte_budget:
        # The shorter of the two stays whole if it takes at most half of the room.
        shorter, longer = sorted(sizes, key=lambda name: sizes[name])
        limits[shorter] = min(sizes[shorter], byte_budget // 2)
        limits[longer] = byte_budget - limits[shorter]
    text = "\n".join(delimited(name, _clip(text, limits[name])) for name, text in texts.items() if text)
    omitted = {name: max(sizes[name] - limits[name], 0) for name in sizes}
    return RenderedContext(text, omitted["policy"], omitted["tools"])


def system_text(trajectory: Trajectory) -> str:
    """Return the policy that a conversation's agent was given."""
    return transcript(trajectory).system


def quotation(text: str, policy: str) -> str:
    """Return the words of a quotation if they occur in the policy, else nothing; white space does not matter."""
    quoted = " ".join(text.split()).strip("\"'“”„«» ")
    is_long_enough = len(quoted) >= MIN_QUOTATION
    return quoted if is_long_enough and quoted in " ".join(policy.split()) else ""


def _lines(trajectory: Trajectory) -> list[_Line]:
    """Return a line for every text, call and answer, in message order."""
    conversation = transcript(trajectory)
    speakers = {"user": "user", "assistant": "agent"}
    lines = [
        _Line(index, _line(index, speakers[message["role"]], text))
        for index, message in enumerate(trajectory.messages)
        if message.get("role") in speakers and (text := message_text(message).strip())
    ]
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
    parameters = _properties(function.get("parameters"))
    return _indented(f"{function.get('name', '')}({parameters}): {function.get('description', '')}")


def _properties(schema: object, depth: int = MAX_SCHEMA_DEPTH) -> str:
    """Return the properties of an object's JSON schema in short, optional ones with a question mark."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    required = schema.get("required") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not depth:
        return ""
    required_names = required if isinstance(required, list) else []
    return ", ".join(
        f"{name}{'' if name in required_names else '?'}: {_value_type(value, depth - 1)}"
        for name, value in properties.items()
    )


def _value_type(schema: object, depth: int) -> str:
    """Return a JSON schema in short: its type or its values, and its description."""
    if not isinstance(schema, dict):
        return "any"
    kinds = schema.get("type", "any")
    if isinstance(schema.get("enum"), list):
        text = "|".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    elif kinds == "array":
        text = f"[{_value_type(schema.get('items'), depth)}]"
    elif kinds == "object":
        text = f"{{{_properties(schema, depth)}}}"
    else:
        text = "|".join(map(str, kinds)) if isinstance(kinds, list) else str(kinds)
    return f"{text} ({schema['description']})" if schema.get("description") else text


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
