"""A conversation's messages as blocks to read: a text, or a tool call with its results.

A message with text and tool calls becomes a block for its text and one for each call. The results of a call are in the
block of the call, and the citations of a message in its first block. Messages are arbitrary recorded data: those that
are no chat messages are shown as JSON, never left out. All texts are safe for the terminal (``tui.text``). Not covered:
how a block looks (``tui.widgets.conversation``).
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traced.client.trajectories import CapabilityLabels
from tui.text import sanitize_block, sanitize_line

CHAT_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name")
ARGUMENTS = 400  # maximum characters of a call's arguments, or of a text, on a folded line


@dataclass(frozen=True)
class Citation:
    """A verdict on a capability that cites one message; ``runs`` of a cycle's ``total_runs`` labelling runs gave it.

    ``reason`` is that of a language model, ``policy`` the sentence of the policy that was broken.
    """

    index: int
    capability: str
    verdict: str
    runs: int
    total_runs: int
    reason: str = ""
    policy: str = ""


@dataclass(frozen=True)
class Block:
    """One block: the line ``head``, with ``body`` below it, or while the block is folded with ``brief`` beside it."""

    index: int  # of its first message
    kind: str  # a role, or "call"
    head: str
    brief: str
    body: str
    citation: tuple[Citation, ...] = ()
    folded: bool = False  # initially


def blocks(messages: Sequence[Any], cited_by: Mapping[int, list[Citation]] | None = None) -> list[Block]:
    """Return the messages' blocks in order; ``cited_by`` maps the index of a message to its citations."""
    cited_by = cited_by or {}
    results = _results(messages)
    result_indexes = {place for places in results.values() for place in places}
    items: list[Block] = []
    for index, message in enumerate(messages):
        if index not in result_indexes:
            items += _of_message(messages, index, message, results, cited_by)
    return items


def citations(labels: Sequence[CapabilityLabels], capability: str | None = None) -> dict[int, list[Citation]]:
    """Return the citations of each message by its index.

    Only ``capability`` counts if it is given, and of each capability only the labels of its last cycle.
    """
    latest = {entry.capability: entry for entry in labels if capability in (None, entry.capability)}
    by_message: dict[int, list[Citation]] = {}
    for entry in latest.values():
        counts = Counter((run.message_index, run.verdict) for run in entry.runs if run.message_index is not None)
        for (index, verdict), runs in counts.items():
            with_reason = (
                run for run in entry.runs if (run.message_index, run.verdict) == (index, verdict) and run.reason
            )
            reason, policy = next(((run.reason, run.policy) for run in with_reason), ("", ""))
            citation = Citation(index, entry.capability, verdict, runs, len(entry.runs), reason, policy)
            by_message.setdefault(index, []).append(citation)
    return {
        index: sorted(some, key=lambda citation: (citation.verdict, -citation.runs))
        for index, some in by_message.items()
    }


def _of_message(
    messages: Sequence[Any],
    index: int,
    message: Any,
    results: dict[tuple[int, int], list[int]],
    cited_by: Mapping[int, list[Citation]],
) -> Iterator[Block]:
    if not isinstance(message, dict):
        yield Block(
            index, "other", "no message", sanitize_line(_json(message), ARGUMENTS), sanitize_block(_json(message))
        )
        return
    role, own_citations = sanitize_line(message.get("role") or "no role", 20), tuple(cited_by.get(index, ()))
    calls = message.get("tool_calls")
    call_list = calls if isinstance(calls, list) else [calls] if calls else []
    text = _message_text(message)
    if text or not call_list:
        yield Block(
            index,
            role,
            role,
            _brief(text),
            sanitize_block(text),
            own_citations,
            folded=role in ("system", "developer", "tool"),
        )
        own_citations = ()
    for place, call in enumerate(call_list):
        result_indexes = results.get((index, place), [])
        call_citations = own_citations + tuple(
            citation for result in result_indexes for citation in cited_by.get(result, ())
        )
        yield _call(messages, index, call, result_indexes, call_citations)
        own_citations = ()


def _call(
    messages: Sequence[Any], index: int, call: Any, result_indexes: list[int], cited_by: tuple[Citation, ...]
) -> Block:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
        name, arguments = sanitize_line(function.get("name") or "?", 60), _read(function.get("arguments"))
    else:
        name, arguments = "?", call
    argument_text = arguments if isinstance(arguments, str) else _arguments(arguments)
    result_texts = [_message_text(messages[result]) for result in result_indexes]
    outcome = _brief(" ".join(result_texts)) if result_texts else "no result"
    brief = f"({sanitize_line(argument_text, ARGUMENTS)}) → {outcome}"
    body = [sanitize_block(_pretty(arguments))]
    for result, text in zip(result_indexes, result_texts, strict=True):
        body += [f"→ #{result}", sanitize_block(_pretty(_read(text)))]
    return Block(
        index, "call", name, brief, "\n".join(body if result_texts else [*body, "→ no result"]), cited_by, True
    )


def _results(messages: Sequence[Any]) -> dict[tuple[int, int], list[int]]:
    """Return the indexes of tool messages by the call that they answer (index of its message, number of the call)."""
    open_calls: dict[str, tuple[int, int]] = {}
    results: dict[tuple[int, int], list[int]] = {}
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        calls = message.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else []):
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                open_calls[call["id"]] = (index, place)
        key = message.get("tool_call_id")
        if message.get("role") == "tool" and isinstance(key, str) and key in open_calls:
            results.setdefault(open_calls[key], []).append(index)
    return results


def _message_text(message: dict[str, Any]) -> str:
    """Return a message's text, and below it the fields outside of ``CHAT_KEYS``, such as reasoning or a refusal."""
    content = message.get("content")
    if isinstance(content, list):
        text = "\n".join(_part(part) for part in content)
    else:
        text = content if isinstance(content, str) else "" if content is None else _json(content)
    extras = {key: value for key, value in message.items() if key not in CHAT_KEYS and value not in (None, "", [], {})}
    lines = [f"{key}: {value if isinstance(value, str) else _json(value)}" for key, value in extras.items()]
    return "\n".join([text, *lines] if text else lines)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    return text if isinstance(text, str) else _json(part)


def _brief(text: str) -> str:
    return sanitize_line(" ".join(text[:ARGUMENTS].split()), ARGUMENTS) or "(empty)"


def _arguments(arguments: Any) -> str:
    if isinstance(arguments, dict):
        return ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
    return _json(arguments)


def _read(text: Any) -> Any:
    """Return the text parsed as JSON, or the value itself if it is no JSON text."""
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
