"""``metrics.jsonl``: one JSON object per iteration, in order, flushed as it happens.

Invariants: the file never holds an iteration twice; when a run resumes from iteration n, later lines (and a line cut
off by a crash) are dropped, because those iterations happen again. Fields: ``traced.training.trainer``.

``samples.json``: the best, the median and the worst rollout of one group of the newest iteration, to be read.

The group is the first whose rewards differ; without one the first that was scored. Written when an iteration's
rollouts are played, before its update.

Invariants: the file is replaced whole, and holds one iteration; its size is bounded (messages up to ``IN_ALL``
characters per rollout, each text of ``CHARACTERS`` at most), and what was left out is said. Text is valid Unicode,
whatever an environment said.
Not covered: rollouts that nobody reads again (what an iteration came to is in ``metrics``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traced.core.files import disk_boundary, publish_file

if TYPE_CHECKING:
    from traced.training.rollouts import Rollout


Metrics = dict[str, float]


def read_metrics(path: Path) -> list[Metrics]:
    """All whole lines of the file; empty when there is none."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def keep_until(path: Path, iteration: int) -> None:
    """Drop what comes after ``iteration``."""
    if path.exists():
        kept = [metrics for metrics in read_metrics(path) if metrics["iteration"] <= iteration]
        publish_file(path, "".join(json.dumps(metrics) + "\n" for metrics in kept))


def append(path: Path, metrics: Metrics) -> None:
    """Add one line."""
    with disk_boundary(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")


def solved(path: Path, after: int) -> bool:
    """Whether the last ``after`` iterations (> 0) had no rollout that failed: nothing is left to learn from."""
    last = read_metrics(path)[-after:]
    return len(last) == after and all(metrics["success"] == 1.0 for metrics in last)


IN_ALL = 60_000
CHARACTERS = 4000
CALLS = 16  # in one message


@dataclass(frozen=True)
class Sample:
    """One rollout: ``place`` is "best", "median" or "worst" of its group, ``left_out`` counts messages."""

    iteration: int
    place: str
    seed: int
    reward: float
    success: bool
    turns: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0


def write_samples(path: Path, iteration: int, played: Sequence[Rollout]) -> None:
    """Replace the file by samples of this iteration."""
    publish_file(path, json.dumps([asdict(sample) for sample in chosen(iteration, played)]) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """What the file holds; empty when there is none."""
    try:
        return [Sample(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []


def chosen(iteration: int, played: Sequence[Rollout]) -> list[Sample]:
    """Best, median and worst, in this order; fewer of a smaller group, none when every group was lost."""
    lost = {rollout.group for rollout in played if rollout.failure is not None or rollout.reward is None}
    groups: dict[int, list[Rollout]] = {}
    for rollout in played:
        if rollout.group not in lost:
            groups.setdefault(rollout.group, []).append(rollout)
    mixed = [group for group in groups.values() if len({rollout.reward for rollout in group}) > 1]
    for group in [*mixed, *groups.values()][:1]:
        ordered = sorted(group, key=lambda rollout: -(rollout.reward or 0.0))
        places = {len(ordered) // 2: "median", len(ordered) - 1: "worst", 0: "best"}
        return [_sample(iteration, places[at], ordered[at]) for at in sorted(places)]
    return []


def _sample(iteration: int, place: str, rollout: Rollout) -> Sample:
    messages: list[dict[str, Any]] = []
    room = IN_ALL
    for message in rollout.messages:
        messages.append(_cut(message))
        room -= len(json.dumps(messages[-1]))
        if room < 0:
            break
    left_out = len(rollout.messages) - len(messages)
    reward = rollout.reward or 0.0
    return Sample(iteration, place, rollout.seed, reward, rollout.success, rollout.turns, messages, left_out)


def _cut(message: dict[str, Any]) -> dict[str, Any]:
    """Its role, text and tool calls in the chat form, each text bounded."""
    content = message.get("content")
    text = content if content is None or isinstance(content, str) else json.dumps(content)
    kept: dict[str, Any] = {"role": _bounded(str(message.get("role", ""))), "content": text and _bounded(text)}
    kept |= {key: _bounded(str(message[key])) for key in ("name", "tool_call_id") if message.get(key)}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [_call(call) for call in calls[:CALLS]]
    return kept


def _call(call: Any) -> dict[str, Any]:
    given = call if isinstance(call, dict) else {}
    function = given.get("function")
    named = function if isinstance(function, dict) else {}
    arguments = named.get("arguments", "")
    told = arguments if isinstance(arguments, str) else json.dumps(arguments)
    made = {"name": _bounded(str(named.get("name", "?"))), "arguments": _bounded(told)}
    return {"id": _bounded(str(given.get("id", ""))), "type": "function", "function": made}


def _bounded(text: str) -> str:
    valid = text[:CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    return valid if len(text) <= CHARACTERS else f"{valid}… (+{len(text) - CHARACTERS:,} characters)"
