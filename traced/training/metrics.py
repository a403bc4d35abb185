"""The files of a training run: ``metrics.jsonl`` (one line per iteration) and ``samples.json`` (rollouts for people).

Invariants: no iteration appears twice in ``metrics.jsonl``; on a resume later lines are dropped, because those
iterations are run again. ``samples.json`` is replaced whole; it holds the best, the median and the worst rollout of
one group of the newest iteration, bounded in size and as valid Unicode.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.contract import Message
from traced.core.files import disk_boundary, publish_file

if TYPE_CHECKING:
    from traced.training.rollouts import Rollout


Metrics = dict[str, float]

# Bounds of a sample, so that a page that shows it stays responsive whatever an environment says.
IN_ALL = 60_000  # characters of messages per rollout
CHARACTERS = 4000  # of one text
CALLS = 16  # tool calls of one message


def read_metrics(path: Path) -> list[Metrics]:
    """Return all complete lines of the file; empty if there is none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last newline is a line that a crash cut off.
    return [json.loads(line) for line in lines[:-1]]


def truncate_after(path: Path, iteration: int) -> None:
    """Drop the lines after ``iteration``."""
    if path.exists():
        rows = [metrics for metrics in read_metrics(path) if metrics["iteration"] <= iteration]
        publish_file(path, "".join(json.dumps(metrics) + "\n" for metrics in rows))


def append(path: Path, metrics: Metrics) -> None:
    """Append one line."""
    with disk_boundary(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def is_solved(path: Path, iterations: int) -> bool:
    """Return whether no rollout failed in the last ``iterations`` (> 0): there is nothing left to learn from."""
    last = read_metrics(path)[-iterations:]
    return len(last) == iterations and all(metrics["success"] == 1.0 for metrics in last)


@dataclass(frozen=True)
class Sample:
    """One rollout: ``place`` is "best", "median" or "worst" of its group, ``left_out`` counts messages."""

    iteration: int
    place: str
    seed: int
    reward: float
    success: bool
    turns: int
    messages: list[Message] = field(default_factory=list)
    left_out: int = 0


def write_samples(path: Path, iteration: int, rollouts: Sequence[Rollout]) -> None:
    """Replace the file with samples of this iteration."""
    publish_file(path, json.dumps([asdict(sample) for sample in select_samples(iteration, rollouts)]) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in the file; empty if there is none."""
    try:
        return [Sample(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []


def select_samples(iteration: int, rollouts: Sequence[Rollout]) -> list[Sample]:
    """Return best, median and worst, in this order; fewer of a small group, none if every group was lost."""
    lost_groups = {rollout.group for rollout in rollouts if rollout.failure is not None or rollout.reward is None}
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.group not in lost_groups:
            groups.setdefault(rollout.group, []).append(rollout)
    mixed_groups = [group for group in groups.values() if len({rollout.reward for rollout in group}) > 1]
    # A group with differing rewards shows what separates success from failure; any other group is the fallback.
    for group in [*mixed_groups, *groups.values()][:1]:
        ranking = sorted(group, key=lambda rollout: -(rollout.reward or 0.0))
        places = {len(ranking) // 2: "median", len(ranking) - 1: "worst", 0: "best"}
        return [_sample(iteration, places[at], ranking[at]) for at in sorted(places)]
    return []


def _sample(iteration: int, place: str, rollout: Rollout) -> Sample:
    messages: list[Message] = []
    remaining_chars = IN_ALL
    for message in rollout.messages:
        messages.append(_cut(message))
        remaining_chars -= len(json.dumps(messages[-1]))
        if remaining_chars < 0:
            break
    left_out = len(rollout.messages) - len(messages)
    reward = rollout.reward or 0.0
    return Sample(iteration, place, rollout.seed, reward, rollout.success, rollout.turns, messages, left_out)


def _cut(message: Message) -> Message:
    """Return its role, text and tool calls in chat form, each text bounded."""
    content = message.get("content")
    text = content if content is None or isinstance(content, str) else json.dumps(content)
    shortened: Message = {"role": _bounded(str(message.get("role", ""))), "content": text and _bounded(text)}
    shortened |= {key: _bounded(str(message[key])) for key in ("name", "tool_call_id") if message.get(key)}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        shortened["tool_calls"] = [_call(call) for call in calls[:CALLS]]
    return shortened


def _call(call: object) -> Message:
    call_object = call if isinstance(call, dict) else {}
    function = call_object.get("function")
    function_object = function if isinstance(function, dict) else {}
    arguments = function_object.get("arguments", "")
    arguments_text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    shortened = {"name": _bounded(str(function_object.get("name", "?"))), "arguments": _bounded(arguments_text)}
    return {"id": _bounded(str(call_object.get("id", ""))), "type": "function", "function": shortened}


def _bounded(text: str) -> str:
    valid = text[:CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return valid if len(text) <= CHARACTERS else f"{valid}… (+{len(text) - CHARACTERS:,} characters)"
