"""τ-bench result files: a JSON array of ``{task_id, reward, info, traj, trial}``, read without its privileged part.

Invariants: only what an agent in production could see is taken over (the messages, and of a record its task id, trial
and reward); ``info``, with the hidden user instructions and the ground-truth actions, never leaves this module, nor
does the text of a damaged record. An id depends on the content, so the same file twice is the same trajectories. A
record without messages is a run that broke down, hence an infrastructure outcome.
How it fails: ``UnreadableFile`` for the file; damaged records are told by the first of two passes, before any
trajectory. Not covered: tool schemas (the file has none, ``schemas`` infers them from the calls), temperature.

Tool schemas inferred from recorded calls, for files that keep the calls but not the tools.

Invariants: a schema names every argument seen and its JSON types; an argument is required when every call had it; the
tool carries ``"x-inferred": true`` and its description says from how many calls it was inferred.
Calls whose arguments are no JSON object count for the tool's name only.
Not covered: enumerations, formats, and what no call happened to use.

τ²-bench result files, ``{timestamp, info, tasks, simulations}``, read without their privileged parts.

Of a simulation its messages, task id, trial and final reward are taken over, and how it ended, to tell whose failure it
was. Everything else (``info``, ``tasks`` with the users' hidden instructions, the ground-truth actions and criteria,
the parts of ``reward_info``) never leaves this module, nor does the text of a damaged simulation. The user's own tool
calls and their results are the user simulator's, so they are left out too.

Invariants: a simulation that was skipped, that the user simulator's failure ended, or that has no messages is an
infrastructure outcome; one without a reward is of unknown outcome. The system prompt is not in the simulations, so
trajectories begin with what the agent said first. Damaged simulations are told by the first of two passes.
How it fails: ``UnreadableFile`` for what is no such object.
Not covered: tool schemas (left out by the writer; ``schemas`` infers them from the calls).
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from store.types import EndCause, Message, Outcome, Tool, Trajectory
from traced.ingest.importers.errors import BadRecord, Damage
from traced.ingest.importers.json_file import Record
from traced.ingest.importers.messages import chat, kind
from traced.ingest.importers.reader import (
    NOT_KNOWN,
    Reading,
    Resume,
    Step,
    damaged,
    place_of,
    records,
    resume_at,
    storable,
    trajectory,
)

Schema = dict[str, Any]
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class ToolInference:
    """Collects the calls of one file; ``tools`` says what they tell."""

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._parameters: dict[str, Schema] = {}

    def observe(self, messages: Iterable[Message]) -> None:
        """Take in the calls of a trajectory."""
        for call in (call for message in messages for call in message.get("tool_calls") or []):
            name = call["function"]["name"]
            self._calls[name] = self._calls.get(name, 0) + 1
            arguments = _parsed(call["function"]["arguments"])
            if isinstance(arguments, dict):
                known, seen = self._parameters.get(name), infer(arguments)
                self._parameters[name] = seen if known is None else merge(known, seen)

    def tools(self) -> list[Tool]:
        """The tools called, by name, as OpenAI schemas."""
        return [self._tool(name) for name in sorted(self._calls)]

    def _tool(self, name: str) -> Tool:
        parameters = self._parameters.get(name, infer({}))
        description = f"Inferred from {self._calls[name]} recorded calls."
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function, "x-inferred": True}


def infer(value: Any) -> Schema:
    """The JSON schema of one value."""
    if isinstance(value, dict):
        properties = {key: infer(item) for key, item in sorted(value.items())}
        return {"type": "object", "properties": properties, "required": sorted(value)}
    if isinstance(value, list):
        items: Schema | None = None
        for item in value:
            items = infer(item) if items is None else merge(items, infer(item))
        return {"type": "array"} if items is None else {"type": "array", "items": items}
    return {"type": JSON_TYPES[type(value)]}


def merge(left: Schema, right: Schema) -> Schema:
    """The schema of values that fit either; commutative, associative and idempotent."""
    merged: Schema = {"type": _either(left["type"], right["type"])}
    objects = [schema for schema in (left, right) if "properties" in schema]
    if objects:
        merged["properties"] = _merge_properties(*(schema["properties"] for schema in objects))
        merged["required"] = sorted(set.intersection(*(set(schema["required"]) for schema in objects)))
    items = [schema["items"] for schema in (left, right) if "items" in schema]
    if items:
        merged["items"] = items[0] if len(items) == 1 else merge(*items)
    return merged


def _merge_properties(left: dict[str, Schema], right: dict[str, Schema] | None = None) -> dict[str, Schema]:
    right = right or {}
    both = sorted({*left, *right})
    return {key: merge(left.get(key) or right[key], right.get(key) or left[key]) for key in both}


def _either(left: str | list[str], right: str | list[str]) -> str | list[str]:
    kinds = {kind for side in (left, right) for kind in ([side] if isinstance(side, str) else side)}
    kinds -= {"integer"} if "number" in kinds else set()
    return kinds.pop() if len(kinds) == 1 else sorted(kinds)


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


TAU2_BENCH = "tau2-bench"
MEMBER = "simulations"
SUCCESS = 1 - 1e-6  # as in tau2.metrics
SIMULATOR_FAILED = ("user_error", "unexpected_error", "infrastructure_error")


def read_tau2_bench(reading: Reading, resume: Resume | None = None) -> Iterator[Step]:
    """The trajectories of a result file, in the file's order (the file is read twice)."""
    tools: list[Tool] | None = resume["tools"] if resume else None
    if tools is None:
        inference = ToolInference()
        for element in records(reading, key=MEMBER, keep=False):
            found = _read(reading, element, [])
            if isinstance(found, BadRecord):
                yield Step(bad=found)
            else:
                inference.observe(found.messages)
                yield Step(good=1)
        tools = inference.tools()
    for element in records(reading, place_of(resume), MEMBER, keep=False):
        found = _read(reading, element, tools)
        if isinstance(element, Record) and not isinstance(found, BadRecord):
            size = sum(len(message["content"] or "") for message in found.messages)
            yield Step([found], size=size, place=resume_at(element.end, tools=tools))


def _read(reading: Reading, element: Record | BadRecord, tools: list[Tool]) -> Trajectory | BadRecord:
    if isinstance(element, BadRecord):
        return element
    try:
        return _trajectory_of_simulation(reading, element.value, tools)
    except Damage as damage:
        return damaged(reading, element, str(damage), keep=False)


def _trajectory_of_simulation(reading: Reading, value: Any, tools: list[Tool]) -> Trajectory:
    if not isinstance(value, dict):
        raise Damage(f"expected an object, found {kind(value)}")
    for key in ("task_id", "messages"):
        if key not in value:
            raise Damage(f"the key {key!r} is missing")
    trial = value.get("trial") or 0
    if isinstance(trial, bool) or not isinstance(trial, int) or not isinstance(value["task_id"], str | int):
        raise Damage(
            f"'trial' and 'task_id' have to be a number and a text, found {trial!r:.60} and {value['task_id']!r:.60}"
        )
    messages = reading.clean_messages(chat(_of_agent(value["messages"])))
    ended = str(value.get("termination_reason") or "")
    judgement, detail = _reward(value.get("reward_info")), ""
    if value.get("skipped") or ended in SIMULATOR_FAILED or not messages:
        judgement = (Outcome.INFRASTRUCTURE, 0.0)
        detail = f"the recorded simulation broke down: {ended}"
    return trajectory(
        TAU2_BENCH,
        reading,
        task_id=str(value["task_id"]),
        trial=trial,
        messages=messages,
        tools=tools,
        judgement=judgement,
        detail=detail,
    )


def _reward(told: Any) -> tuple[Outcome, float]:
    """Only the sum of it: its parts say what the grader looked for."""
    if told is None:
        return NOT_KNOWN
    reward = told.get("reward") if isinstance(told, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise Damage("'reward_info' has to hold a reward from 0 to 1")
    return (Outcome.SUCCESS if reward >= SUCCESS else Outcome.FAILURE), float(reward)


def _of_agent(messages: Any) -> list[Any]:
    """The messages that the agent saw or wrote, results of tools with the ids of their calls."""
    if not isinstance(messages, list):
        raise Damage(f"'messages' has to be a list, found {kind(messages)}")
    seen: list[Any] = []
    for message in messages:
        parts = message.get("tool_messages") if isinstance(message, dict) else None
        for one in parts if isinstance(parts, list) else [message]:
            if not isinstance(one, dict):
                seen.append(one)  # damaged: chat() says so
            elif one.get("role") == "tool":
                seen += [{**one, "tool_call_id": one.get("id")}] if one.get("requestor") != "user" else []
            elif one.get("role") != "user":
                seen.append({**one, "tool_calls": _own(one.get("tool_calls"))})
            elif one.get("content"):
                seen.append({**one, "tool_calls": None})
    return seen


def _own(calls: Any) -> Any:
    """The agent's calls."""
    if not isinstance(calls, list):
        return calls
    return [call for call in calls if not (isinstance(call, dict) and call.get("requestor") == "user")]


TAU_BENCH = "tau-bench"


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
    identity = json.dumps([TAU_BENCH, reading.agent, record["task_id"], record["trial"], reward, messages])
    return Trajectory(
        id=hashlib.sha256(identity.encode()).hexdigest(),
        source=TAU_BENCH,
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
