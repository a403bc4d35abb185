"""Requests where things have names: files, things with a code here and there, requests that come later."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agents.analyst.builtin import discover, label_runs
from store.types import Outcome, Tool, Trajectory, Verdict
from tests.unit.agents.analysis.library import agent, calls, declared, talk, user

STEMS = ("notes", "plan", "to_do", "read-me", "mr. smith", "a")
FILES = [f"{stem}.{suffix}" for stem in STEMS for suffix in ("txt", "md")]
COLOURS = ("red", "blue", "green", "old", "new", "big", "tin", "glass", "odd", "flat", "tall", "thin")
MULTI_STEP = "multi-step-completion"


def tool(name: str, description: str, *arguments: str) -> Tool:
    return declared(name, description, **{argument: {"type": "string"} for argument in arguments})


def conversation(
    number: int, text: str, call_list: Sequence[tuple[str, dict[str, str]]], tools: list[Tool]
) -> Trajectory:
    """A conversation of one request and its calls; two of three succeed."""
    parts = [calls(name, {"ok": True, **arguments}, **arguments) for name, arguments in call_list]
    outcome = Outcome.SUCCESS if number % 3 else Outcome.FAILURE
    return replace(talk(user(text), *parts, agent("Done."), name=str(number), outcome=outcome), tools=tools)


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
        call_list = [("copy_file", {"file": first}), ("delete_file", {"file": second})]
        text = f"Please copy {first} to the archive. Also, please delete {second}."
        rows.append(conversation(number, text, call_list[: 1 + (number % 3 > 0)], tools))
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
        call_list: list[tuple[str, dict[str, str]]] = [("refuel_line", {"line_id": first})]
        call_list += [("suspend_line", {"line_id": second})] * (number % 3 > 0)
        call_list += [("toggle_data", {}), ("reset_network", {})] * (2 * with_phone)
        text = f"Please refuel line {first}. Also, please suspend line {second}."
        rows.append(conversation(number, text, call_list, tools))
    assert counts(rows) == EXPECTED


def test_a_later_request_is_not_served_by_what_came_before() -> None:
    tools = [tool("open", "Open a thing.", "thing"), tool("close", "Close a thing.", "thing")]
    rows = []
    for number in range(90):
        first, second = f"{COLOURS[number % 12]} box", f"{COLOURS[(number + 1 + number % 7) % 12]} door"
        call_list = [("open", {"thing": first}), *([("close", {"thing": second})] * (number % 3 > 0))]
        text = f"I would like a look into the {first}. Please open the {first}. Also, please close the {second}."
        rows.append(conversation(number, text, call_list, tools))
    assert counts(rows) == EXPECTED
