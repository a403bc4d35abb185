"""Examples of a capability that was lacking: the cited messages of failures, with the reasons of a language model.

Labels of rules have no reasons; the message that they cite is the evidence. Not covered: labels that cite no message.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlmodel import Session

from store.repositories.capabilities import trajectory_headers
from store.repositories.trajectories import get_trajectories
from store.repositories.trajectory_pages import first_words
from store.types import Label, Message, Outcome, Verdict

EXAMPLES = 3
MAX_CHARACTERS = 400  # of a quoted message


@dataclass(frozen=True)
class Example:
    """A failure in which labels hold a capability to be lacking, and the message that most of them cite.

    Attributes:
        runs: Labelling runs with this verdict on the trajectory.
        request: The first words of the user.
        text: The message, cut to ``MAX_CHARACTERS``.
        reason: Why, in the words of a language model; "" for rules.
        policy: The sentence of the policy that was broken, "" if none was named.
    """

    trajectory_id: str
    task_id: str
    runs: int
    message_index: int
    role: str
    request: str
    text: str
    reason: str = ""
    policy: str = ""


def lacking_examples(session: Session, labels: Iterable[Label], limit: int = EXAMPLES) -> list[Example]:
    """Return failures that lack the capability of ``labels``, of different tasks as far as there are.

    Those with a reason come first, then those in which most runs agree.
    """
    labels_by_id: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        if label.verdict is Verdict.LACKING and label.message_index is not None:
            labels_by_id[label.trajectory_id].append(label)
    # Messages are read of the examples alone: a cycle has thousands of trajectories.
    headers = trajectory_headers(session, sorted(labels_by_id))
    failures = [key for key, header in headers.items() if header.outcome is Outcome.FAILURE]
    is_explained = {key: any(label.reason for label in labels_by_id[key]) for key in failures}
    ranked = sorted(failures, key=lambda key: (not is_explained[key], -len(labels_by_id[key]), key))
    first_of_task = {headers[key].task_id: key for key in reversed(ranked)}
    ranked.sort(key=lambda key: first_of_task[headers[key].task_id] != key)
    rows = {row.id: row for row in get_trajectories(session, ranked[:limit], tokens=False)}
    examples = (_example(labels_by_id[key], rows[key].task_id, rows[key].messages) for key in ranked[:limit])
    return [example for example in examples if example is not None]


def _example(labels: list[Label], task_id: str, messages: list[Message]) -> Example | None:
    [(index, _)] = Counter(label.message_index for label in labels).most_common(1)
    if index is None or not 0 <= index < len(messages):
        return None
    message = messages[index]
    best = max((label for label in labels if label.message_index == index), key=lambda label: bool(label.reason))
    text = message_text(message)
    text = f"{text[:MAX_CHARACTERS]}…" if len(text) > MAX_CHARACTERS else text
    role = str(message.get("role", ""))
    return Example(
        labels[0].trajectory_id,
        task_id,
        len(labels),
        index,
        role,
        first_words(messages),
        text,
        best.reason,
        best.policy,
    )


def message_text(message: Message) -> str:
    """Return the content and the tool calls of a message as text."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = [] if content is None else [content if isinstance(content, str) else _json(content)]
    return "\n".join([*parts, *map(_call_text, calls if isinstance(calls, list) else [])])


def _call_text(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return _json(call)
    arguments = function.get("arguments", "")
    return f"→ {function.get('name', '')}({arguments if isinstance(arguments, str) else _json(arguments)})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
