"""The check of an environment's world: the target's own, and no tool whose agreement is clearly too low."""

import dataclasses

from sandbox.admission.context import Thresholds
from sandbox.admission.world import MeasuredShare, ToolReplay, WorldReplay, omitted_tools, world, world_of

GOOD, LOW, SINGLE, EMPTY = (
    MeasuredShare(20, 1.0, 0.84, 1.0),
    MeasuredShare(20, 0.5, 0.3, 0.7),
    MeasuredShare(4, 0.0, 0.0, 0.49),
    MeasuredShare(0, 0.0, 0.0, 1.0),
)
TOOLS = {"get", "lend", "search"}


def tool(
    name: str,
    exact: MeasuredShare,
    error_class: MeasuredShare = GOOD,
    *,
    is_write: bool = False,
    calls: str = "held out",
    states: MeasuredShare = EMPTY,
) -> ToolReplay:
    return ToolReplay(name, is_write, calls, exact, error_class, states, exact)


def replay(*tools: ToolReplay) -> WorldReplay:
    return WorldReplay("d1", tools)


def test_the_world_is_named_by_a_constant_of_the_file() -> None:
    assert world_of('"""An environment."""\nWORLD = "d1"\n') == "d1"
    assert world_of("WORLDS = 'd1'\ndef f():\n    WORLD = 'd2'\n") is None
    assert world_of("def (") is None


def test_agreement_within_bounds_passes_and_tools_without_answers_are_named() -> None:
    tools = [tool("get", GOOD), tool("lend", EMPTY, EMPTY, is_write=True)]
    passed, evidence = world("d1", set(), replay(*tools), TOOLS, Thresholds())
    assert passed
    assert (evidence["tools_judged"], evidence["not_judged"]) == (1, ["lend", "search"])


def test_another_world_is_refused() -> None:
    assert not world("d2", set(), replay(tool("get", GOOD)), TOOLS, Thresholds())[0]


def test_a_tool_is_refused_only_where_its_whole_interval_lies_below_the_bound() -> None:
    row = tool("get", LOW)
    passed, evidence = world("d1", set(), replay(row), TOOLS, Thresholds())
    assert not passed
    assert evidence["disagreeing"] == ["get, held out calls: exact 0.50 [0.30, 0.70] of 20"]
    assert world("d1", set(), replay(dataclasses.replace(row, exact=SINGLE)), TOOLS, Thresholds())[0]
    wide = MeasuredShare(6, 0.67, 0.3, 0.91)
    assert world("d1", set(), replay(dataclasses.replace(row, exact=wide)), TOOLS, Thresholds())[0]
    assert not world("d1", set(), replay(dataclasses.replace(row, is_write=True)), TOOLS, Thresholds())[0]
    wrong_errors = tool("lend", GOOD, LOW, is_write=True, calls="left out")
    assert not world("d1", set(), replay(wrong_errors), TOOLS, Thresholds())[0]
    assert world("d1", set(), replay(wrong_errors), {"get"}, Thresholds())[0]


def test_a_tool_that_shows_wrong_states_after_writes_is_refused() -> None:
    passed, evidence = world("d1", set(), replay(tool("get", GOOD, states=LOW)), TOOLS, Thresholds())
    assert not passed
    assert evidence["disagreeing"] == ["get, held out calls: states 0.50 [0.30, 0.70] of 20"]
    good = "1.00 [0.84, 1.00] of 20"
    assert evidence["agreement"] == {
        "get, held out": f"exact {good}; fields {good}; error class {good}; states 0.50 [0.30, 0.70] of 20"
    }
    assert world("d1", set(), replay(tool("get", GOOD, states=SINGLE)), TOOLS, Thresholds())[0]


def test_a_tool_that_the_environment_omits_refuses_nothing_and_is_named() -> None:
    wrong = tool("get", LOW)
    reason = "get: of 20 answered held out calls 50 % [30, 70] exact"
    passed, evidence = world("d1", {"get"}, WorldReplay("d1", [wrong], [reason]), TOOLS, Thresholds())
    assert passed
    assert (evidence["omitted"], evidence["disagreeing"]) == ([reason], [])
    assert omitted_tools('WORLD = "d1"\nWORLD_OMITS = ["get", "lend"]\n') == {"get", "lend"}
    assert omitted_tools('WORLD = "d1"\n') == set()
