"""Trajectories as a model reads them: short ids, clipped to a budget of tokens, between marks.

A conversation is a line per message, ``m4 agent: ...``, whose further lines are indented, so that no text can pretend
to be a message. Where it does not fit, long messages lose their middle first; then whole messages go, those in the
middle of the conversation before tool errors (and the calls that met them), the beginning and the end. What is left out
is said, and cannot be cited.

Invariants: only messages and tools are read (``agents.transcript``): never ``parts``, ``task_id``, a reward or a
trajectory's id. Tokens are estimated as a third of the bytes in UTF-8, which is more than tokenizers make of English
and about what they make of JSON. A text never takes more than its budget, but for a few words that say what is missing.
How it fails: ``TranscriptError``, as ``agents.transcript``. Not covered: images and audio.

Words that a model wrote, made fit to be kept: on one line, printable, of bounded length; and names compared.

Pure functions. A name is two to five lower-case words joined by hyphens: it becomes part of an adapter's name and of
paths, and never is one of the names that the models themselves have, which are single words.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agents.analyst.language import stem
from agents.llm.question import marked
from agents.transcript import Transcript, tool_function, transcript
from store.types import Trajectory

BYTES_PER_TOKEN = 3
SHORTEST = 240  # bytes that a message keeps before whole messages go
FIRST, LAST = 3, 6  # messages at either end that go last
GAP = "[...]"


@dataclass(frozen=True)
class Shown:
    """A conversation as text, and the indices of the messages that can be cited by it."""

    text: str
    messages: frozenset[int]

    def cited(self, told: str) -> int | None:
        """The index that a citation such as "m4" names; None where no such message was shown."""
        number = told.strip().removeprefix("m")
        index = int(number) if number.isdecimal() and len(number) < 8 else -1
        return index if index in self.messages else None


@dataclass(frozen=True)
class _Line:
    index: int
    text: str
    error: bool = False


def tokens(text: str) -> int:
    """How many tokens a text takes, at most, as a rule."""
    return -(-len(_bytes(text)) // BYTES_PER_TOKEN)


def shown(trajectory: Trajectory, budget: int) -> Shown:
    """The conversation without policy and tools, in at most ``budget`` tokens."""
    lines = _lines(transcript(trajectory))
    room = budget * BYTES_PER_TOKEN
    limit = max((len(_bytes(line.text)) for line in lines), default=0)
    while limit > SHORTEST and _size(lines, limit) > room:
        limit = max(limit * 3 // 4, SHORTEST)
    whole = _size(lines, limit) <= room
    kept = set(range(len(lines))) if whole else _most_telling(lines, limit, room)
    told: list[str] = []
    for place, line in enumerate(lines):
        if place in kept:
            told.append(_clipped(line.text, limit))
        elif place == 0 or place - 1 in kept:
            told.append(GAP)
    return Shown("\n".join(told), frozenset(lines[place].index for place in kept))


def surroundings(trajectories: Sequence[Trajectory], budget: int) -> str:
    """What the agents were told and offered, each text once, in at most ``budget`` tokens, between marks."""
    read = [transcript(trajectory) for trajectory in trajectories]
    policies = list(dict.fromkeys(one.system.strip() for one in read if one.system.strip()))
    offered = list(dict.fromkeys(json.dumps(one.tools, sort_keys=True) for one in read if one.tools))
    tools = [line for told in offered for line in map(_tool, json.loads(told))]
    room = budget * BYTES_PER_TOKEN // 2
    parts = []
    if policies:
        parts.append(marked("policy", _clipped("\n\n".join(policies), room)))
    if tools:
        parts.append(marked("tools", _clipped("\n".join(dict.fromkeys(tools)), room)))
    return "\n".join(parts)


def _lines(spoken: Transcript) -> list[_Line]:
    """A line for every text, call and answer, in the order of the messages."""
    told = [_Line(said.index, _line(said.index, "user", said.text)) for said in spoken.user]
    told += [_Line(said.index, _line(said.index, "agent", said.text)) for said in spoken.agent]
    for call in spoken.calls:
        failed = call.result is not None and call.result.error
        told.append(_Line(call.index, _line(call.index, "agent calls", f"{call.name}({call.raw})"), failed))
        if call.result is not None:
            said = _line(call.result.index, f"{call.name} answers", call.result.text)
            told.append(_Line(call.result.index, said, failed))
    return sorted(told, key=lambda line: line.index)


def _line(index: int, who: str, text: str) -> str:
    return _indented(f"m{index} {' '.join(who.split())}: {text}")


def _indented(text: str) -> str:
    """A text none of whose lines but the first begins a line."""
    return "\n    ".join(_bytes(text).decode().splitlines())


def _tool(tool: object) -> str:
    function = tool_function(tool) if isinstance(tool, dict) else {}
    parameters = json.dumps(function.get("parameters", {}), ensure_ascii=False)
    return _indented(f"{function.get('name', '')}: {function.get('description', '')} {parameters}")


def _most_telling(lines: Sequence[_Line], limit: int, room: int) -> set[int]:
    """The places of as many lines as fit: what began it, the ends, then errors, then from the end to the beginning."""

    def weight(place: int) -> tuple[int, int]:
        if place == 0:
            return 0, 0
        at_an_end = place < FIRST or place >= len(lines) - LAST
        return (1 if at_an_end else 2 if lines[place].error else 3), -place

    kept: set[int] = set()
    for place in sorted(range(len(lines)), key=weight):
        size = _size([lines[place]], limit) + len(GAP) + 1
        if size <= room:
            kept.add(place)
            room -= size
    return kept


def _size(lines: Sequence[_Line], limit: int) -> int:
    return sum(min(len(_bytes(line.text)), limit) + 1 for line in lines)


def _clipped(text: str, limit: int) -> str:
    """At most ``limit`` bytes of a text, from its beginning and its end."""
    told = _bytes(text)
    if len(told) <= limit:
        return text
    missing = f" [... {len(told) - limit} bytes left out ...] "
    room = max(limit - len(missing), 0)
    head, tail = told[: room * 2 // 3], told[len(told) - room // 3 :]
    return head.decode("utf-8", "ignore") + missing + tail.decode("utf-8", "ignore")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+){1,4}")
LONGEST_NAME = 60
TAKEN = frozenset({"grpo-on-target"})  # what a cycle compares its adapters with
_EMPTY = frozenset({"a", "an", "and", "before", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


def one_line(text: str, limit: int) -> str:
    """A text without line breaks and control characters, cut where it is longer."""
    plain = "".join(sign if sign.isprintable() else " " for sign in text)
    line = " ".join(plain.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def is_name(text: str) -> bool:
    """Whether a capability may be called that."""
    return len(text) <= LONGEST_NAME and NAME.fullmatch(text) is not None and text not in TAKEN


def as_name(text: str) -> str:
    """The nearest name to what a model wrote; "" where there is none."""
    words = re.findall(r"[a-z0-9]+", text.lower())[:5]
    name = "-".join(words)
    return name if is_name(name) else ""


def near(one: str, other: str) -> bool:
    """Whether two names are the same but for the order and the forms of their words, small words and hyphens."""
    return _words(one) == _words(other) or one.replace("-", "") == other.replace("-", "")


def _words(name: str) -> frozenset[str]:
    return frozenset(stem(word) for word in name.split("-") if word not in _EMPTY)
