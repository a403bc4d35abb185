"""A conversation's messages as blocks to read: a text, or a tool call with its results.

Every message is in exactly one block; the results of a call, and the citations of a message, are in its block. Messages
are arbitrary recorded data: those that are no chat messages are shown as JSON, never left out. All texts are safe for
the terminal (``tui.text``). Not covered: how a block looks (``tui.widgets.conversation``).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traced.client.trajectories import CapabilityLabels
from tui.text import sanitize_block, sanitize_line

CHAT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
ARGUMENTS = 400  # characters of a call's arguments that a folded line is cut from


@dataclass(frozen=True)
class Citation:
    """What of a capability some of a cycle's runs said, citing one message."""

    index: int
    capability: str
    verdict: str
    runs: int
    of: int


@dataclass(frozen=True)
class Block:
    """``head`` is one line; ``body`` is shown beneath it unless folded, and instead of ``brief``."""

    index: int  # of its first message
    kind: str  # a role, or "call"
    head: str
    brief: str
    body: str
    cited: tuple[Citation, ...] = ()
    folded: bool = False  # at first


def blocks(messages: Sequence[Any], cited: Mapping[int, list[Citation]] | None = None) -> list[Block]:
    """All of them, in order; ``cited`` is what cites each message."""
    cited = cited or {}
    results = _results(messages)
    within = {place for places in results.values() for place in places}
    found: list[Block] = []
    for index, message in enumerate(messages):
        if index not in within:
            found += _of_message(messages, index, message, results, cited)
    return found


def citations(labels: Sequence[CapabilityLabels], capability: str | None = None) -> dict[int, list[Citation]]:
    """What cites each message, for ``capability`` alone where one is given; the last cycle's word on each counts."""
    newest = {one.capability: one for one in labels if capability in (None, one.capability)}
    found: dict[int, list[Citation]] = {}
    for one in newest.values():
        counts = Counter((run.message_index, run.verdict) for run in one.runs if run.message_index is not None)
        for (index, verdict), runs in counts.items():
            found.setdefault(index, []).append(Citation(index, one.capability, verdict, runs, len(one.runs)))
    return {index: sorted(some, key=lambda cited: (cited.verdict, -cited.runs)) for index, some in found.items()}


def _of_message(
    messages: Sequence[Any],
    index: int,
    message: Any,
    results: dict[tuple[int, int], list[int]],
    cited: Mapping[int, list[Citation]],
) -> Iterator[Block]:
    if not isinstance(message, dict):
        yield Block(
            index, "other", "no message", sanitize_line(_json(message), ARGUMENTS), sanitize_block(_json(message))
        )
        return
    role, own = sanitize_line(message.get("role") or "no role", 20), tuple(cited.get(index, ()))
    calls = message.get("tool_calls")
    listed = calls if isinstance(calls, list) else [calls] if calls else []
    said = _said(message)
    if said or not listed:
        yield Block(
            index, role, role, _brief(said), sanitize_block(said), own, folded=role in ("system", "developer", "tool")
        )
        own = ()
    for place, call in enumerate(listed):
        behind = results.get((index, place), [])
        known = own + tuple(one for result in behind for one in cited.get(result, ()))
        yield _call(messages, index, call, behind, known)
        own = ()


def _call(messages: Sequence[Any], index: int, call: Any, behind: list[int], cited: tuple[Citation, ...]) -> Block:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        name, given = sanitize_line(function.get("name") or "?", 60), _read(function.get("arguments"))
    else:
        name, given = "?", call
    written = given if isinstance(given, str) else _arguments(given)
    gave = [_said(messages[result]) for result in behind]
    brief = f"({sanitize_line(written, ARGUMENTS)}) → {_brief(' '.join(gave)) if gave else 'nothing came back'}"
    body = [sanitize_block(_pretty(given))]
    for result, text in zip(behind, gave, strict=True):
        body += [f"→ #{result}", sanitize_block(_pretty(_read(text)))]
    return Block(index, "call", name, brief, "\n".join(body if gave else [*body, "→ nothing came back"]), cited, True)


def _results(messages: Sequence[Any]) -> dict[tuple[int, int], list[int]]:
    """The places of tool messages by the message and the number of the call that they answer."""
    open_calls: dict[str, tuple[int, int]] = {}
    found: dict[tuple[int, int], list[int]] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else []):
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                open_calls[call["id"]] = (index, place)
        key = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(key, str) and key in open_calls:
            found.setdefault(open_calls[key], []).append(index)
    return found


def _said(message: dict[str, Any]) -> str:
    """A message's text, and beneath it what it has beside the chat form's keys: reasoning, a refusal."""
    content = message.get("content")
    if isinstance(content, list):
        text = "\n".join(_part(one) for one in content)
    else:
        text = content if isinstance(content, str) else "" if content is None else _json(content)
    more = {key: value for key, value in message.items() if key not in CHAT_KEYS and value not in (None, "", [], {})}
    told = [f"{key}: {value if isinstance(value, str) else _json(value)}" for key, value in more.items()]
    return "\n".join([text, *told] if text else told)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _json(part)


def _brief(text: str) -> str:
    return sanitize_line(" ".join(text[:ARGUMENTS].split()), ARGUMENTS) or "(empty)"


def _arguments(given: Any) -> str:
    if isinstance(given, dict):
        return ", ".join(f"{name}={_json(value)}" for name, value in given.items())
    return _json(given)


def _read(text: Any) -> Any:
    """What a text says as JSON, or the text."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _pretty(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=2)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
