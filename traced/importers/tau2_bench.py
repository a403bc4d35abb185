"""τ²-bench result files, ``{timestamp, info, tasks, simulations}``, read without their privileged parts.

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

from collections.abc import Iterator
from typing import Any

from store.types import Outcome, Tool, Trajectory
from traced.importers.errors import BadRecord, Damage
from traced.importers.json_array import Record
from traced.importers.messages import chat, kind
from traced.importers.reading import (
    NOT_KNOWN,
    Reading,
    Resume,
    Step,
    damaged,
    place_of,
    records,
    resume_at,
    trajectory,
)
from traced.importers.schemas import ToolInference

SOURCE = "tau2-bench"
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
        return _trajectory(reading, element.value, tools)
    except Damage as damage:
        return damaged(reading, element, str(damage), keep=False)


def _trajectory(reading: Reading, value: Any, tools: list[Tool]) -> Trajectory:
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
        SOURCE,
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
