"""τ-bench result files: a JSON array of ``{task_id, reward, info, traj, trial}``, read without its privileged part.

Invariants: only what an agent in production could see is taken over (the messages, and of a record its task id, trial
and reward); ``info``, with the hidden user instructions and the ground-truth actions, never leaves this module, nor
does the text of a damaged record. An id depends on the content, so the same file twice is the same trajectories. A
record without messages is a run that broke down, hence an infrastructure outcome.
How it fails: ``UnreadableFile`` for the file; damaged records are told by the first of two passes, before any
trajectory. Not covered: tool schemas (the file has none, ``schemas`` infers them from the calls), temperature.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.importers.errors import BadRecord, Damage
from traced.importers.json_array import Record
from traced.importers.messages import chat, kind
from traced.importers.reading import Reading, Resume, Step, damaged, place_of, records, resume_at, storable
from traced.importers.schemas import ToolInference

SOURCE = "tau-bench"
SUCCESS = 1 - 1e-6  # as in tau_bench.run.is_successful


def read_tau_bench(reading: Reading, resume: Resume | None = None) -> Iterator[Step]:
    """The trajectories of a result file, in the file's order (the file is read twice)."""
    tools: list[Tool] | None = resume["tools"] if resume else None
    if tools is None:
        inference = ToolInference()
        for element in records(reading, keep=False):
            public = _public(reading, element)
            if isinstance(public, BadRecord):
                yield Step(bad=public)
            else:
                inference.observe(public["messages"])
                yield Step(good=1)
        tools = inference.tools()
    for element in records(reading, place_of(resume), keep=False):
        public = _public(reading, element)
        if isinstance(element, Record) and not isinstance(public, BadRecord):
            made = _trajectory(public, tools, reading)
            yield Step([made], size=public["size"], place=resume_at(element.end, tools=tools))


def _public(reading: Reading, element: Record | BadRecord) -> dict[str, Any] | BadRecord:
    """The public part of a record, checked."""
    if isinstance(element, BadRecord):
        return element
    try:
        return _checked(element.value)
    except Damage as damage:
        return damaged(reading, element, str(damage), keep=False)


def _checked(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Damage(f"expected an object, found {kind(value)}")
    for key in ("task_id", "reward", "traj"):
        if key not in value:
            raise Damage(f"the key {key!r} is missing")
    reward, trial = value["reward"], value.get("trial", 0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise Damage(f"'reward' has to be a number from 0 to 1, found {reward!r:.60}")
    if not _is_int(trial) or not (_is_int(value["task_id"]) or isinstance(value["task_id"], str)):
        raise Damage(
            f"'trial' and 'task_id' have to be whole numbers, found {trial!r:.60} and {value['task_id']!r:.60}"
        )
    if not isinstance(value["traj"], list):
        raise Damage(f"'traj' has to be a list of messages, found {kind(value['traj'])}")
    messages = chat(value["traj"])
    if messages and messages[0]["role"] != "system":
        raise Damage(f"the first message has to be the system's, found the role {messages[0]['role']!r}")
    size = sum(len(message["content"] or "") for message in messages)
    task_id = storable(str(value["task_id"]))
    return {"task_id": task_id, "trial": trial, "reward": float(reward), "messages": messages, "size": size}


def _trajectory(record: dict[str, Any], tools: list[Tool], reading: Reading) -> Trajectory:
    messages: list[Message] = reading.clean_messages(record["messages"])
    reward = record["reward"]
    outcome = Outcome.SUCCESS if reward >= SUCCESS else Outcome.FAILURE
    if not messages:
        outcome = Outcome.INFRASTRUCTURE
    identity = json.dumps([SOURCE, reading.agent, record["task_id"], record["trial"], reward, messages])
    return Trajectory(
        id=hashlib.sha256(identity.encode()).hexdigest(),
        source=SOURCE,
        split="",
        task_id=record["task_id"],
        trial=record["trial"],
        model=reading.agent,
        temperature=0.0,
        messages=messages,
        tools=tools,
        turns=[],
        reward=reward,
        outcome=outcome,
        end_cause=EndCause.IMPORTED,
        detail="" if messages else "the recorded run broke down before its first message",
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
