"""Requests where things have names: files, things with a code here and there, requests that come later."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from agents.analyst.builtin import discover, label_runs
from agents.analyst.corpus import mine
from agents.analyst.detectors import detect_multi_step_completion
from agents.analyst.intents import Intents, object_names
from agents.analyst.view import view
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


TOOLS = [tool("open", "Open it.", "thing"), tool("close", "Close it.", "thing")]
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


def test_codes_and_calls_without_texts_are_no_names() -> None:
    by_name = [("open", {"thing": f"{colour} box"}) for colour in COLOURS]
    by_code = [("refuel", {"line_id": f"L{1001 + number}"}) for number in range(11)]
    tools = [
        tool("open", "Open a thing.", "thing"),
        tool("refuel", "Refuel a line.", "line_id"),
        tool("reset", "Reset."),
    ]

    def names_of(call_list: Sequence[tuple[str, dict[str, str]]]) -> frozenset[str]:
        text = " ".join(value for _, arguments in call_list for value in arguments.values())
        return object_names([view(conversation(1, text, call_list, tools))], ["open", "refuel", "reset"])

    assert names_of([*by_name, *by_code]) == {f"{colour} box" for colour in COLOURS}
    assert names_of([*by_name[:10], *by_code]) == frozenset()
    # Most writes with a text have a code, whatever is called besides.
    assert names_of([*by_name[:10], *by_code, *([("reset", {})] * 20)]) == frozenset()


def test_what_two_requests_share_identifies_neither() -> None:
    intents = Intents({}, {}, frozenset({"mug", "shelf", "worm"}))
    trajectory = conversation(1, "Rest the mug on the shelf. Bring me the worm from the shelf.", [], [])
    assert [set(request.objects) for request in intents.requests(view(trajectory))] == [{"mug"}, {"worm"}]
    repeated = conversation(1, "Open the shelf. Then, close the shelf.", [], [])
    assert [request.objects for request in intents.requests(view(repeated))] == [{"shelf"}]
    cues = {"open": {"open": 1.0}, "close": {"close": 1.0}}
    with_cues = Intents(cues, dict.fromkeys(cues, frozenset[str]()), intents.names)
    request_list = with_cues.requests(view(repeated))
    assert [(request.tool, set(request.objects)) for request in request_list] == [
        ("open", {"shelf"}),
        ("close", {"shelf"}),
    ]
    two_clauses = conversation(1, "I need the mug. Please open the mug.", [], [])
    assert [request.tool for request in with_cues.requests(view(two_clauses))] == ["open"]
    assert [request.objects for request in with_cues.requests(view(two_clauses))] == [{"mug"}]


def test_a_write_before_the_request_does_not_serve_it() -> None:
    corpus_rows = [
        conversation(number, f"Hold the {COLOURS[number]} box.", [("open", {"thing": f"{COLOURS[number]} box"})], TOOLS)
        for number in range(12)
    ]
    late = talk(
        *calls("open", {"ok": True}, thing="red box"),
        user("Handle the red box. Also, handle the blue box."),
        calls("open", {"ok": True}, thing="blue box"),
        agent("Done."),
        name="late",
    )
    rows = [*corpus_rows, replace(late, tools=TOOLS)]
    corpus = mine([view(row) for row in rows], [row.outcome for row in rows])
    assert detect_multi_step_completion(view(rows[-1]), corpus).verdict is Verdict.LACKING
