"""τ-bench result files: a JSON array of ``{task_id, reward, info, traj, trial}``, read without its privileged part.

Invariants: only what an agent in production could see is taken over (a message's role, content, name, tool calls and
tool call id; of a record its task id, trial and reward); ``info``, with the hidden user instructions and the
ground-truth actions, never leaves this module. An id depends on the content, so the same file twice is the same
trajectories. A record without messages is a run that broke down, hence an infrastructure outcome.
How it fails: ``UnreadableFile`` for the file, ``BadRecord`` for the first damaged record before anything is yielded;
with ``skip_bad`` damaged records go to ``on_bad`` and the others are yielded.
Not covered: tool schemas (the file has none, ``schemas`` infers them from the calls), temperature (recorded as 0).
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.importers.errors import BadRecord
from traced.importers.json_array import Record, read_array
from traced.importers.schemas import ToolInference

SOURCE = "tau-bench"
START = re.compile(r'\{\s*"task_id"\s*:')
ROLES = ("system", "user", "assistant", "tool")
SUCCESS = 1 - 1e-6  # as in tau_bench.run.is_successful


class _Damage(ValueError):
    """Why a record that is JSON is still no τ-bench record."""


def read_tau_bench(
    path: Path,
    *,
    model: str = "recorded",
    skip_bad: bool = False,
    on_bad: Callable[[BadRecord], None] | None = None,
) -> Iterator[Trajectory]:
    """The trajectories of a result file of the agent ``model``, in the file's order (the file is read twice).

    Raises ``UnreadableFile``, and ``BadRecord`` unless ``skip_bad``; then each damaged record is told to ``on_bad``.
    """
    inference = ToolInference()
    for record in _records(path):
        if not isinstance(record, BadRecord):
            inference.observe(record["messages"])
        elif not skip_bad:
            raise record
        elif on_bad is not None:
            on_bad(record)
    tools = inference.tools()
    for record in _records(path):
        if not isinstance(record, BadRecord):
            yield _trajectory(record, tools, model)


def _records(path: Path) -> Iterator[dict[str, Any] | BadRecord]:
    for element in read_array(path, START):
        if isinstance(element, BadRecord):
            yield element
            continue
        try:
            yield _public(element)
        except _Damage as damage:
            yield BadRecord(path, element.number, element.line, element.column, str(damage))


def _public(record: Record) -> dict[str, Any]:
    """The public part of a record, checked."""
    value = record.value
    if not isinstance(value, dict):
        raise _Damage(f"expected an object, found {_kind(value)}")
    for key in ("task_id", "reward", "traj"):
        if key not in value:
            raise _Damage(f"the key {key!r} is missing")
    reward, trial = value["reward"], value.get("trial", 0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise _Damage(f"'reward' has to be a number from 0 to 1, found {reward!r}")
    if not _is_int(trial) or not (_is_int(value["task_id"]) or isinstance(value["task_id"], str)):
        raise _Damage(f"'trial' and 'task_id' have to be whole numbers, found {trial!r} and {value['task_id']!r}")
    if not isinstance(value["traj"], list):
        raise _Damage(f"'traj' has to be a list of messages, found {_kind(value['traj'])}")
    messages = [_message(message, index) for index, message in enumerate(value["traj"])]
    if messages and messages[0]["role"] != "system":
        raise _Damage(f"the first message has to be the system's, found the role {messages[0]['role']!r}")
    return {"task_id": str(value["task_id"]), "trial": trial, "reward": float(reward), "messages": messages}


def _message(message: Any, index: int) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise _Damage(f"message {index} has no role of {', '.join(ROLES)}")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise _Damage(f"message {index} has content that is no text but {_kind(content)}")
    public: Message = {"role": message["role"], "content": content}
    if message.get("tool_calls"):
        public["tool_calls"] = _calls(message["tool_calls"], index)
    return public | {key: message[key] for key in ("tool_call_id", "name") if isinstance(message.get(key), str)}


def _calls(calls: Any, index: int) -> list[dict[str, Any]]:
    public = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise _Damage(f"message {index} has a tool call without a name and arguments as JSON text")
        function = {"name": name, "arguments": arguments}
        public.append({"id": str(call.get("id", "")), "type": "function", "function": function})
    return public


def _trajectory(record: dict[str, Any], tools: list[Tool], model: str) -> Trajectory:
    messages, reward = record["messages"], record["reward"]
    outcome = Outcome.SUCCESS if reward >= SUCCESS else Outcome.FAILURE
    if not messages:
        outcome = Outcome.INFRASTRUCTURE
    identity = json.dumps([SOURCE, model, record["task_id"], record["trial"], reward, messages])
    return Trajectory(
        id=hashlib.sha256(identity.encode()).hexdigest(),
        source=SOURCE,
        split="",
        task_id=record["task_id"],
        trial=record["trial"],
        model=model,
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


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
