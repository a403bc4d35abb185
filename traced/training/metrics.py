"""The files of a training run: ``metrics.jsonl`` (one line per iteration) and ``samples.json`` (rollouts for people).

Invariants: no iteration appears twice in ``metrics.jsonl``; on a resume later lines are dropped, because those
iterations are run again. ``samples.json`` is replaced whole; it holds the best, the median and the worst rollout of
one group of the newest iteration, bounded in size and as valid Unicode.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox.contract import Message
from traced.core.files import disk_boundary, flush, publish_file
from traced.training.errors import NothingToLearn

if TYPE_CHECKING:
    from traced.training.rollouts import Conversation, Rollout


Metrics = dict[str, float]

PATIENCE = 3  # iterations in a row without anything to learn from, after which a policy may have collapsed
CERTAIN = 0.5  # share of the entropy of iterations with a gradient, below which a policy has become certain
# A run that never had a mixed group fails once this success rate per rollout would have given none so rarely.
RARE_SUCCESS, CHANCE = 0.01, 0.01
MAJORITY = 0.5  # share of the rollouts from which on an observation explains them
DIAGNOSTICS = (
    "reward",
    "success",
    "trajectories_kept",
    "mean_length",
    "mean_turns",
    "ended_by_environment",
    "ended_by_turns",
    "ended_by_length",
    "cut_off",
    "gradient_dropped",
)

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


def append(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append one line, which survives a power cut: the checkpoint of its iteration may."""
    with disk_boundary(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(metrics) + "\n")
        file.flush()
        os.fsync(file.fileno())
    flush(path.parent)


def is_solved(path: Path, iterations: int) -> bool:
    """Return whether no rollout failed in the last ``iterations`` (> 0): there is nothing left to learn from."""
    last = read_metrics(path)[-iterations:]
    return len(last) == iterations and all(metrics["success"] == 1.0 for metrics in last)


def stall(rows: Sequence[Metrics], *, rollouts: int, start: int = 0) -> str:
    """Return why a run that has learned learns nothing more, or "" if it goes on.

    It goes on for as long as chance may bring a group with different rewards. So a run that has learned is stalled only
    if its last ``PATIENCE`` iterations had nothing to learn from and its policy has become certain, or if they had
    mixed groups and yet no gradient. An iteration in which every rollout succeeded is no failure, and one that lost
    most groups to the infrastructure says nothing about the environment.

    Args:
        rows: The metrics of the run's iterations.
        rollouts: The rollouts of a group.
        start: The iteration after which the policy was last set back; those before it do not count as its last ones.

    Raises:
        NothingToLearn: No iteration had a gradient, and ``groups_by_chance`` groups or more had equal rewards.
    """
    last, earlier = [row for row in rows[-PATIENCE:] if row["iteration"] > start], rows[:-PATIENCE]
    if len(last) < PATIENCE or not all(_is_fruitless(metrics) for metrics in last):
        return ""
    is_defect = all(metrics["trajectories_kept"] > 0 for metrics in last)
    if any(has_signal(metrics) for metrics in earlier):
        return _observed(last) if is_defect or is_certain(rows) else ""
    fruitless = last if is_defect else [metrics for metrics in rows if _is_fruitless(metrics)]
    groups = sum(metrics.get("groups", 0) - metrics.get("lost_groups", 0) for metrics in fruitless)
    if not is_defect and groups < groups_by_chance(rollouts):
        return ""
    raise NothingToLearn(_observed(fruitless), hint=_advice(_means(fruitless)))


def groups_by_chance(rollouts: int) -> int:
    """Return how many groups of this size can all have equal rewards by chance.

    Rollouts that succeed independently with probability p = ``RARE_SUCCESS`` have equal rewards in a group of K with
    probability e = (1 - p)^K + p^K, and in n groups with probability e^n. The result is the smallest n for which that
    is at most ``CHANCE``: 58 for K = 8, which are 8 iterations of 8 groups.
    """
    equal_rewards = (1 - RARE_SUCCESS) ** rollouts + RARE_SUCCESS**rollouts
    return math.ceil(math.log(CHANCE) / math.log(equal_rewards))


def is_certain(rows: Sequence[Metrics]) -> bool:
    """Return whether the policy has become certain in the last ``PATIENCE`` iterations.

    Their mean entropy is below ``CERTAIN`` times the mean over earlier iterations that had a gradient. The bound is
    relative, because the entropy that a healthy policy has depends on its model and environment.
    """
    entropies = [metrics["entropy"] for metrics in rows[:-PATIENCE] if has_signal(metrics)]
    last = [metrics["entropy"] for metrics in rows[-PATIENCE:]]
    return bool(entropies) and sum(last) / len(last) < CERTAIN * sum(entropies) / len(entropies)


def has_signal(metrics: Metrics) -> bool:
    """Return whether the rewards of an iteration gave a gradient."""
    return metrics["trajectories_kept"] > 0 and metrics["grad_norm"] > 0


def is_outage(metrics: Metrics) -> bool:
    """Return whether most groups of an iteration were lost, so that it says nothing about the environment."""
    return metrics.get("lost_groups", 0) > metrics.get("groups", 0) / 2


def _is_fruitless(metrics: Metrics) -> bool:
    return not has_signal(metrics) and metrics["success"] < 1.0 and not is_outage(metrics)


def _means(rows: Sequence[Metrics]) -> Metrics:
    return {name: sum(metrics.get(name, 0.0) for metrics in rows) / len(rows) for name in DIAGNOSTICS}


def _observed(rows: Sequence[Metrics]) -> str:
    numbers = f"{rows[0]['iteration']:.0f} to {rows[-1]['iteration']:.0f}"
    return f"iterations {numbers} had nothing to learn from: {_diagnosis(_means(rows))}"


def _diagnosis(means: Metrics) -> str:
    """Return what the rollouts of some iterations looked like, from the means of their metrics."""
    return (
        f"mean reward {means['reward']:.2f}, success {means['success']:.0%}, trajectories in groups with different "
        f"rewards {means['trajectories_kept']:.0f}; per rollout {means['mean_length']:.0f} sampled tokens and "
        f"{means['mean_turns']:.1f} turns; ended by the environment {means['ended_by_environment']:.0%}, at the turn "
        f"limit {means['ended_by_turns']:.0%}, at the length limit {means['ended_by_length']:.0%}; with an answer that "
        f"was cut off {means['cut_off']:.0%}"
        + f"; {means['gradient_dropped']:.0%} of the gradients were not finite"
        * (means["gradient_dropped"] > 0)
    )


def _advice(means: Metrics) -> str:
    """Return what to change, by the most specific observation."""
    if means["gradient_dropped"] > 0:
        return "lower training.lr"
    if means["cut_off"] > MAJORITY:
        return "raise engine.max_tokens: answers are cut off"
    if means["ended_by_turns"] > MAJORITY:
        return "raise training.max_turns: episodes do not come to their end"
    if means["ended_by_length"] > MAJORITY:
        return "raise training.max_length: episodes do not come to their end"
    if means["trajectories_kept"] > 0:
        return "report the log as a defect: there are trajectories, but no gradient"
    return "raise training.rollouts or training.temperature, or use an environment that the base model solves sometimes"


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


def end_shares(rollouts: Sequence[Rollout], end_tokens: Collection[int]) -> Metrics:
    """Return by what the scored rollouts ended, and in how many of them an answer was cut off, as shares."""
    scored = [rollout for rollout in rollouts if rollout.failure is None and rollout.conversation is not None]
    total = max(1, len(scored))
    ends = Counter(str(rollout.end) for rollout in scored)
    cut_off = sum(_is_cut_off(rollout.conversation, end_tokens) for rollout in scored if rollout.conversation)
    return {
        "ended_by_environment": (ends["environment"] + ends["agent_fault"]) / total,
        "ended_by_turns": ends["max_turns"] / total,
        "ended_by_length": ends["max_length"] / total,
        "cut_off": cut_off / total,
    }


def _is_cut_off(conversation: Conversation, end_tokens: Collection[int]) -> bool:
    """Return whether one of the answers, which are the runs of sampled tokens, ends without one of these tokens."""
    mask = conversation.mask
    last_places = [i for i in range(len(mask)) if mask[i] and (i + 1 == len(mask) or not mask[i + 1])]
    return any(conversation.ids[i] not in end_tokens for i in last_places)


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
