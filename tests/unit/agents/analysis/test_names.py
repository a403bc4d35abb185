"""Requests where things have names: files, things with a code here and there, requests that come later."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agents.analyst.builtin import discover, label_runs
from store.types import EndCause, Outcome, Trajectory, Verdict

STEMS = ("notes", "plan", "to_do", "read-me", "mr. smith", "a")
FILES = [f"{stem}.{suffix}" for stem in STEMS for suffix in ("txt", "md")]
COLOURS = ("red", "blue", "green", "old", "new", "big", "tin", "glass", "odd", "flat", "tall", "thin")
MULTI_STEP = "multi-step-completion"


def tool(name: str, description: str, *arguments: str) -> dict[str, Any]:
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def conversation(
    number: int, user: Sequence[str], calls: Sequence[tuple[str, dict[str, str]]], tools: list[dict[str, Any]]
) -> Trajectory:
    """A conversation in which the agent makes its calls after the user's first message."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": user[0]}]
    for position, (name, arguments) in enumerate(calls):
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{"id": f"c{position}", "function": function}]},
            {"role": "tool", "tool_call_id": f"c{position}", "content": json.dumps({"ok": True, **arguments})},
        ]
    for text in user[1:]:
        messages += [{"role": "assistant", "content": "Done. More?"}, {"role": "user", "content": text}]
    messages.append({"role": "assistant", "content": "Done."})
    is_served = number % 3 > 0
    return Trajectory(
        id=str(number),
        source="files",
        split="train",
        task_id=str(number),
        trial=0,
        model="base",
        temperature=1.0,
        messages=messages,
        tools=tools,
        turns=[],
        reward=float(is_served),
        outcome=Outcome.SUCCESS if is_served else Outcome.FAILURE,
        end_cause=EndCause.DONE,
    )


def verdicts(trajectories: Sequence[Trajectory]) -> dict[str, Verdict]:
    capabilities = [entry for entry in discover(trajectories, seed=0) if entry.name == MULTI_STEP]
    labels = label_runs(trajectories, capabilities, runs=[0], seed=0)
    return {label.trajectory_id: label.verdict for label in labels}


def counts(trajectories: Sequence[Trajectory]) -> dict[Verdict, int]:
    return dict(Counter(verdicts(trajectories).values()))


EXPECTED = {Verdict.LACKING: 30, Verdict.PRESENT: 60}


def test_files_are_things_with_names() -> None:
    tools = [tool("copy_file", "Copy a file.", "file"), tool("delete_file", "Delete a file.", "file")]
    rows = []
    for number in range(90):
        first, second = FILES[number % 12], FILES[(number + 1 + number % 7) % 12]
        calls = [("copy_file", {"file": first}), ("delete_file", {"file": second})]
        text = f"Please copy {first} to the archive. Also, please delete {second}."
        rows.append(conversation(number, [text], calls[: 1 + (number % 3 > 0)], tools))
    assert counts(rows) == EXPECTED


@pytest.mark.parametrize("with_phone", [False, True])
def test_writes_without_arguments_make_no_world_of_names(with_phone: bool) -> None:
    tools = [
        tool("toggle_data", "Toggle mobile data."),
        tool("reset_network", "Reset the network."),
        tool("refuel_line", "Add data to a line.", "line_id"),
        tool("suspend_line", "Suspend a line.", "line_id"),
    ]
    rows = []
    for number in range(90):
        first, second = f"L{1001 + number}", f"L{3001 + number}"
        calls: list[tuple[str, dict[str, str]]] = [("refuel_line", {"line_id": first})]
        calls += [("suspend_line", {"line_id": second})] * (number % 3 > 0)
        calls += [("toggle_data", {}), ("reset_network", {})] * (2 * with_phone)
        text = f"Please refuel line {first}. Also, please suspend line {second}."
        rows.append(conversation(number, [text], calls, tools))
    assert counts(rows) == EXPECTED


def test_a_later_request_is_not_served_by_what_came_before() -> None:
    tools = [tool("open", "Open a thing.", "thing"), tool("close", "Close a thing.", "thing")]
    rows = []
    for number in range(90):
        first, second = f"{COLOURS[number % 12]} box", f"{COLOURS[(number + 1 + number % 7) % 12]} door"
        calls = [("open", {"thing": first}), *([("close", {"thing": second})] * (number % 3 > 0))]
        text = f"I would like a look into the {first}. Please open the {first}. Also, please close the {second}."
        rows.append(conversation(number, [text], calls, tools))
    assert counts(rows) == EXPECTED
