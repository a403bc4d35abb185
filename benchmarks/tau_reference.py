"""The difference between a failed conversation of τ-bench and its ground truth: what an analysis should point at.

τ-bench compares the database after the conversation with the database after the ground truth's actions, and looks for
required texts in the agent's messages. So only calls that change something count, and of those the successful ones:

    wrong argument          a write of the ground truth was made with another argument
    missing write           a write of the ground truth was not made
    forbidden write         a write was made that the ground truth does not have
    none although needed    the ground truth has writes, the conversation has none
    output                  the agent's messages lack a required text

Writes are paired by tool, the most similar first; two writes of one tool that share no value are a missing and a
forbidden one. Read by benchmarks only: an analyst never sees ground truth.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agents.analyst.values import leaves
from agents.transcript import Call, Utterance, transcript
from store.types import Outcome, Trajectory
from traced.ingest.importers.reader import ImportJob
from traced.ingest.importers.tau_bench import read_tau_bench
from traced.ingest.redaction import Redactor
from traced.scoring.evidence import Labels

HANDOVER = "transfer_to_human_agents"
# The first words of the names of τ-bench's tools that change nothing, in both domains.
READS = ("get", "find", "list", "search", "calculate", "think", "transfer")
MIN_VALUE = 3  # characters from which on a value is recognised in a text


class Kind(StrEnum):
    """A class of difference."""

    WRONG_ARGUMENT = "wrong argument"
    MISSING = "missing write"
    FORBIDDEN = "forbidden write"
    INACTION = "none although needed"
    OUTPUT = "output"


@dataclass(frozen=True)
class Reference:
    """What differs in one failed conversation.

    Attributes:
        kinds: The classes of the differences; empty if the ground truth explains the failure by none.
        wrong_writes: The messages with a wrong write: a successful one that the ground truth does not have, or an
            attempt that the tool rejected and whose fault lasted, because a successful write has the same wrong value
            or because no write took its place.
        wrong_values: The wrong values of these writes, as texts.
        omissions: The messages by which the agent may have left out a write or a required text.
        is_users_fault: Whether the user's messages, not the agent, explain every difference.
    """

    kinds: frozenset[Kind]
    wrong_writes: frozenset[int]
    wrong_values: frozenset[str]
    omissions: frozenset[int]
    is_users_fault: bool

    def agrees(self, trajectory: Trajectory, index: int) -> bool:
        """Return whether message ``index`` is a step at which the conversation departs from the ground truth.

        It is if it is a wrong write, or the tool's answer to one; an omission, if something is missing; or a text
        of the agent before a wrong write that states one of its wrong values.
        """
        message = trajectory.messages[index]
        if message["role"] == "tool":
            index = _caller(trajectory, index)
            message = trajectory.messages[index]
        if index in self.wrong_writes or index in self.omissions:
            return True
        text = message.get("content") or ""
        if message["role"] != "assistant" or not any(index < write for write in self.wrong_writes):
            return False
        return any(value in text for value in self.wrong_values)


def _caller(trajectory: Trajectory, index: int) -> int:
    while trajectory.messages[index]["role"] == "tool":
        index -= 1
    return index


def read_conversations(folder: Path) -> tuple[list[Trajectory], dict[str, Reference]]:
    """Return the conversations of τ-bench's result files in a folder, and the reference of each failure by its id."""
    trajectories: list[Trajectory] = []
    references: dict[str, Reference] = {}
    for path in sorted(folder.glob("*.json")):
        job = ImportJob(path, path.stem, path.with_suffix(".scratch"), Redactor([], []), Labels([], []))
        imported = [trajectory for step in read_tau_bench(job) for trajectory in step.trajectories]
        tasks = [record["info"]["task"] for record in json.loads(path.read_text())]
        for trajectory, task in zip(imported, tasks, strict=True):
            if trajectory.outcome is Outcome.FAILURE:
                references[trajectory.id] = reference(trajectory, task)
        trajectories += imported
    return trajectories, references


def reference(trajectory: Trajectory, task: Mapping[str, Any]) -> Reference:
    """Return the difference between a failed conversation and its task's ground truth."""
    expected = [_Write(action["name"], action["kwargs"]) for action in task["actions"] if is_write(action["name"])]
    conversation = transcript(trajectory)
    calls = [call for call in conversation.calls if is_write(call.name)]
    actual = [_write(call) for call in calls if call.succeeded]
    changed, missing, forbidden = _differences(expected, actual)
    kinds = {Kind.WRONG_ARGUMENT} if changed else set()
    kinds |= {Kind.FORBIDDEN} if forbidden else set()
    if missing:
        kinds.add(Kind.MISSING if actual else Kind.INACTION)
    texts = "\n".join(message.text for message in conversation.agent).replace(",", "").lower()
    absent = [text for text in task["outputs"] if text.lower() not in texts]
    kinds |= {Kind.OUTPUT} if absent else set()
    departures = [_departures(_write(call), expected) for call in calls]
    lasting = {leaf for call, departure in zip(calls, departures, strict=True) if call.succeeded for leaf in departure}
    unmade = {write.name for write in missing}
    wrong = [
        (call.index, departure)
        for call, departure in zip(calls, departures, strict=True)
        if departure and (call.succeeded or departure & lasting or call.name in unmade)
    ]
    wrong_values = {value for _, departure in wrong for _, _, value in departure}
    right_indices = [call.index for call, departure in zip(calls, departures, strict=True) if not departure]
    return Reference(
        kinds=frozenset(kinds),
        wrong_writes=frozenset(index for index, _ in wrong),
        wrong_values=frozenset(value for value in wrong_values if len(value) >= MIN_VALUE),
        omissions=frozenset(
            _closing_steps(trajectory, calls, max(right_indices, default=-1)) if missing or absent else ()
        ),
        is_users_fault=bool(kinds)
        and not forbidden
        and not absent
        and all(_user_misled(pair, conversation.user) for pair in changed)
        and all(_user_withheld(write, trajectory, str(task["instruction"])) for write in missing),
    )


@dataclass(frozen=True)
class _Write:
    name: str
    arguments: Mapping[str, Any]

    @property
    def values(self) -> set[str]:
        return {str(value) for _, value in leaves(self.arguments)}

    @property
    def leaf_set(self) -> set[tuple[str, str, str]]:
        return {(self.name, path, str(value)) for path, value in leaves(self.arguments)}

    def similarity(self, other: "_Write") -> int:
        """Return how many leaves two writes share."""
        return len(self.leaf_set & other.leaf_set)


def _write(call: Call) -> _Write:
    return _Write(call.name, call.arguments or {})


def _departures(write: _Write, expected: Sequence[_Write]) -> set[tuple[str, str, str]]:
    """Return the (tool, path, value) of a write that the most similar expected write of its tool does not have."""
    same_tool = [other for other in expected if other.name == write.name]
    nearest = max(same_tool, key=write.similarity, default=_Write(write.name, {}))
    return write.leaf_set - nearest.leaf_set


def is_write(name: str) -> bool:
    """Return whether a tool of τ-bench changes something."""
    return not name.startswith(READS)


def _differences(
    expected: Sequence[_Write], actual: Sequence[_Write]
) -> tuple[list[tuple[_Write, _Write]], list[_Write], list[_Write]]:
    """Return the pairs of (expected, actual) that differ, the expected writes without and the actual ones without."""
    missing, forbidden = list(expected), list(actual)
    for write in expected:
        if write in forbidden:
            forbidden.remove(write)
            missing.remove(write)
    pairs = []
    while candidates := [
        (left.similarity(right), number, left, right)
        for number, left in enumerate(missing)
        for right in forbidden
        if left.name == right.name and left.similarity(right)
    ]:
        _, _, left, right = max(candidates, key=lambda candidate: (candidate[0], -candidate[1]))
        missing.remove(left)
        forbidden.remove(right)
        pairs.append((left, right))
    return pairs, missing, forbidden


def _closing_steps(trajectory: Trajectory, writes: Iterable[Call], last_right: int) -> Iterator[int]:
    """Yield the agent's texts and hand-overs without a write, after the last write that was right."""
    write_indices = {call.index for call in writes}
    for index, message in enumerate(trajectory.messages):
        if message["role"] == "assistant" and index > last_right and index not in write_indices:
            names = [call["function"]["name"] for call in message.get("tool_calls") or []]
            if message.get("content") or HANDOVER in names:
                yield index


def _user_misled(pair: tuple[_Write, _Write], messages: Sequence[Utterance]) -> bool:
    """Return whether the user said every wrong value and none of the right ones."""
    text = "\n".join(message.text for message in messages).lower()
    expected, actual = pair
    wrong = [value.lower() for value in actual.values - expected.values if len(value) >= MIN_VALUE]
    right = [value.lower() for value in expected.values - actual.values if len(value) >= MIN_VALUE]
    return bool(wrong) and all(value in text for value in wrong) and not any(value in text for value in right)


def _user_withheld(write: _Write, trajectory: Trajectory, instruction: str) -> bool:
    """Return whether the user was told a value of a missing write that nobody mentioned in the conversation."""
    text = "\n".join(str(message.get("content") or "") for message in trajectory.messages[1:]).lower()
    values = [value.lower() for value in write.values if len(value) >= MIN_VALUE and value in instruction]
    return any(value not in text for value in values)
