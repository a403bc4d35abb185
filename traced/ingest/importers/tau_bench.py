"""Readers of τ-bench and τ²-bench result files, which leave out the files' privileged parts.

    τ-bench    [{task_id, reward, info, traj, trial}, ...]
    τ²-bench   {timestamp, info, tasks, simulations: [{task_id, trial, messages, reward_info, termination_reason}]}

Only data that an agent in production could see is stored: messages, task id, trial and final reward. Hidden user
instructions, ground-truth actions, grading criteria and the text of invalid records never leave this module. The files
hold the tool calls but not the tools, so tool schemas are inferred from the calls. For this a file is read twice; the
first pass reports bad records. Not covered: enumerations, string formats, arguments that no call used.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from store.types import INFERRED, EndCause, Message, Outcome, Tool, Trajectory
from traced.ingest.importers.errors import BadRecord, RecordFormatError
from traced.ingest.importers.json_file import Record
from traced.ingest.importers.messages import chat_messages, type_name
from traced.ingest.importers.reader import (
    UNKNOWN_OUTCOME,
    ImportJob,
    ResumePoint,
    Step,
    bad_record,
    file_position,
    make_resume_point,
    records,
    storable,
    text_size,
    time_of_value,
    trajectory,
)

TAU_BENCH = "tau-bench"
TAU2_BENCH = "tau2-bench"
SIMULATIONS_KEY = "simulations"
# As in tau2.metrics.
SUCCESS_REWARD = 1 - 1e-6
# Reasons of termination that say nothing about the agent.
SIMULATOR_ERRORS = ("user_error", "unexpected_error", "infrastructure_error")
JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}

Schema = dict[str, Any]
# The messages from which tools are inferred, and a function that builds the trajectory from the tools.
ParsedRun = tuple[list[Message], Callable[[list[Tool]], Trajectory]]
RunParser = Callable[[ImportJob, object], ParsedRun]


def read_tau_bench(job: ImportJob, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the trajectories of a τ-bench result file in its order, from a resume point on if there is one."""
    yield from _read_twice(job, resume, _parse_run)


def read_tau2_bench(job: ImportJob, resume: ResumePoint | None = None) -> Iterator[Step]:
    """Yield the trajectories of a τ²-bench result file in its order, from a resume point on if there is one."""
    yield from _read_twice(job, resume, _parse_simulation, SIMULATIONS_KEY)


class ToolInference:
    """Infers tool schemas from the tool calls of a file.

    A schema has every observed argument with its JSON types; an argument is required if every call had it.
    """

    def __init__(self) -> None:
        self._calls: dict[str, int] = {}
        self._parameters: dict[str, Schema] = {}

    def observe(self, messages: Iterable[Message]) -> None:
        """Add the tool calls of a trajectory."""
        for call in (call for message in messages for call in message.get("tool_calls") or []):
            name = call["function"]["name"]
            self._calls[name] = self._calls.get(name, 0) + 1
            arguments = _parse_json(call["function"]["arguments"])
            # From a call whose arguments are not a JSON object, only the name of the tool is used.
            if isinstance(arguments, dict):
                previous, observed = self._parameters.get(name), infer_schema(arguments)
                self._parameters[name] = observed if previous is None else merge_schemas(previous, observed)

    def tools(self) -> list[Tool]:
        """Return the tools that were called, sorted by name, as OpenAI function tools."""
        return [self._tool(name) for name in sorted(self._calls)]

    def _tool(self, name: str) -> Tool:
        parameters = self._parameters.get(name, infer_schema({}))
        description = f"Inferred from {self._calls[name]} recorded calls."
        function = {"name": name, "description": description, "parameters": parameters}
        return {"type": "function", "function": function, INFERRED: True}


def infer_schema(value: object) -> Schema:
    """Return the JSON schema of one value."""
    if isinstance(value, dict):
        properties = {key: infer_schema(item) for key, item in sorted(value.items())}
        return {"type": "object", "properties": properties, "required": sorted(value)}
    if isinstance(value, list):
        items: Schema | None = None
        for item in value:
            items = infer_schema(item) if items is None else merge_schemas(items, infer_schema(item))
        return {"type": "array"} if items is None else {"type": "array", "items": items}
    return {"type": JSON_TYPES[type(value)]}


def merge_schemas(left: Schema, right: Schema) -> Schema:
    """Return a schema for values of either schema; the merge is commutative, associative and idempotent."""
    merged: Schema = {"type": _merge_types(left["type"], right["type"])}
    objects = [schema for schema in (left, right) if "properties" in schema]
    if objects:
        merged["properties"] = _merge_properties(*(schema["properties"] for schema in objects))
        merged["required"] = sorted(set.intersection(*(set(schema["required"]) for schema in objects)))
    items = [schema["items"] for schema in (left, right) if "items" in schema]
    if items:
        merged["items"] = items[0] if len(items) == 1 else merge_schemas(*items)
    return merged


def _merge_properties(left: dict[str, Schema], right: dict[str, Schema] | None = None) -> dict[str, Schema]:
    right = right or {}
    names = sorted({*left, *right})
    return {key: merge_schemas(left.get(key) or right[key], right.get(key) or left[key]) for key in names}


def _merge_types(left: str | list[str], right: str | list[str]) -> str | list[str]:
    types = {name for side in (left, right) for name in ([side] if isinstance(side, str) else side)}
    # Every integer is a number in JSON schema.
    types -= {"integer"} if "number" in types else set()
    return types.pop() if len(types) == 1 else sorted(types)


def _parse_json(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _read_twice(job: ImportJob, resume: ResumePoint | None, parse: RunParser, key: str | None = None) -> Iterator[Step]:
    tools: list[Tool] | None = resume["tools"] if resume else None
    if tools is None:
        inference = ToolInference()
        for element in records(job, key=key, keep_text=False):
            result = _parsed(job, element, parse)
            if isinstance(result, BadRecord):
                yield Step(bad=result)
            else:
                inference.observe(result[0])
                yield Step(good=1)
        tools = inference.tools()
    for element in records(job, file_position(resume), key, keep_text=False):
        result = _parsed(job, element, parse)
        if isinstance(element, Record) and not isinstance(result, BadRecord):
            messages, build = result
            # The resume point holds the tools, so that a resumed import skips the first pass.
            point = make_resume_point(element.end, tools=tools)
            yield Step([build(tools)], size=text_size(messages), resume_point=point)


def _parsed(job: ImportJob, element: Record | BadRecord, parse: RunParser) -> ParsedRun | BadRecord:
    if isinstance(element, BadRecord):
        return element
    try:
        return parse(job, element.value)
    except RecordFormatError as error:
        return bad_record(job, element, str(error), keep_text=False)


def _parse_run(job: ImportJob, value: object) -> ParsedRun:
    """Check a record of τ-bench and return its messages and the function that builds its trajectory."""
    if not isinstance(value, dict):
        raise RecordFormatError(f"expected an object, found {type_name(value)}")
    for key in ("task_id", "reward", "traj"):
        if key not in value:
            raise RecordFormatError(f"the key {key!r} is missing")
    reward, trial, task_id = value["reward"], value.get("trial", 0), value["task_id"]
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise RecordFormatError(f"'reward' has to be a number from 0 to 1, found {reward!r:.60}")
    if not _is_int(trial) or not (_is_int(task_id) or isinstance(task_id, str)):
        raise RecordFormatError(
            f"'trial' and 'task_id' have to be whole numbers, found {trial!r:.60} and {task_id!r:.60}"
        )
    if not isinstance(value["traj"], list):
        raise RecordFormatError(f"'traj' has to be a list of messages, found {type_name(value['traj'])}")
    messages = chat_messages(value["traj"])
    if messages and messages[0]["role"] != "system":
        raise RecordFormatError(f"the first message has to be the system's, found the role {messages[0]['role']!r}")
    # Messages are redacted after the inference, because a redacted argument would change the type in its schema.
    task_id = storable(str(task_id))
    build = functools.partial(
        _trajectory_of_run, job=job, task_id=task_id, trial=trial, reward=float(reward), messages=messages
    )
    return messages, build


def _trajectory_of_run(
    tools: list[Tool], *, job: ImportJob, task_id: str, trial: int, reward: float, messages: list[Message]
) -> Trajectory:
    cleaned: list[Message] = job.clean_messages(messages)
    outcome = Outcome.SUCCESS if reward >= SUCCESS_REWARD else Outcome.FAILURE
    if not cleaned:
        outcome = Outcome.INFRASTRUCTURE
    # Unlike the ids of ``traced.ingest.importers.reader.trajectory``, this id depends on the reward. The rule must not
    # change, because trajectories are stored under such ids.
    identity = json.dumps([TAU_BENCH, job.agent, task_id, trial, reward, cleaned])
    return Trajectory(
        id=hashlib.sha256(identity.encode()).hexdigest(),
        source=TAU_BENCH,
        split=job.target.split(task_id),
        task_id=task_id,
        trial=trial,
        model=job.agent,
        temperature=0.0,
        messages=cleaned,
        tools=tools,
        turns=[],
        reward=reward,
        outcome=outcome,
        end_cause=EndCause.IMPORTED,
        detail="" if cleaned else "the recorded run failed before its first message",
    )


def _parse_simulation(job: ImportJob, value: object) -> ParsedRun:
    """Check a simulation of τ²-bench and return its messages and the function that builds its trajectory."""
    if not isinstance(value, dict):
        raise RecordFormatError(f"expected an object, found {type_name(value)}")
    for key in ("task_id", "messages"):
        if key not in value:
            raise RecordFormatError(f"the key {key!r} is missing")
    trial, task_id = value.get("trial") or 0, value["task_id"]
    if not _is_int(trial) or not isinstance(task_id, str | int):
        raise RecordFormatError(
            f"'trial' and 'task_id' have to be a number and a text, found {trial!r:.60} and {task_id!r:.60}"
        )
    messages: list[Message] = job.clean_messages(chat_messages(_agent_messages(value["messages"])))
    end_reason = str(value.get("termination_reason") or "")
    judgement, detail = _reward_outcome(value.get("reward_info")), ""
    if value.get("skipped") or end_reason in SIMULATOR_ERRORS or not messages:
        judgement = (Outcome.INFRASTRUCTURE, 0.0)
        detail = f"the recorded simulation failed: {end_reason}"

    def build(tools: list[Tool]) -> Trajectory:
        return trajectory(
            TAU2_BENCH,
            job,
            task_id=str(task_id),
            trial=trial,
            messages=messages,
            tools=tools,
            judgement=judgement,
            detail=detail,
            started_at=time_of_value(value.get("start_time")),
        )

    return messages, build


def _reward_outcome(reward_info: object) -> tuple[Outcome, float]:
    # Only the total reward is read, because its parts reveal the grading criteria.
    if reward_info is None:
        return UNKNOWN_OUTCOME
    reward = reward_info.get("reward") if isinstance(reward_info, dict) else None
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not 0 <= reward <= 1:
        raise RecordFormatError("'reward_info' has to hold a reward from 0 to 1")
    return (Outcome.SUCCESS if reward >= SUCCESS_REWARD else Outcome.FAILURE), float(reward)


def _agent_messages(messages: object) -> list[Any]:
    """Return the messages that the agent received or wrote."""
    if not isinstance(messages, list):
        raise RecordFormatError(f"'messages' has to be a list, found {type_name(messages)}")
    visible: list[Any] = []
    for message in messages:
        parts = message.get("tool_messages") if isinstance(message, dict) else None
        for part in parts if isinstance(parts, list) else [message]:
            if not isinstance(part, dict):
                # The message is invalid; chat_messages reports it.
                visible.append(part)
            elif part.get("role") == "tool":
                # The user simulator has its own tools, whose results the agent never sees.
                visible += [{**part, "tool_call_id": part.get("id")}] if part.get("requestor") != "user" else []
            elif part.get("role") != "user":
                visible.append({**part, "tool_calls": _agent_calls(part.get("tool_calls"))})
            elif part.get("content"):
                visible.append({**part, "tool_calls": None})
    return visible


def _agent_calls(calls: object) -> Any:
    if not isinstance(calls, list):
        return calls
    return [call for call in calls if not (isinstance(call, dict) and call.get("requestor") == "user")]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
