"""Agreement of a world by tool: counts, what each share is of, JSON and back, and the report's table."""

import dataclasses
import json

from agents.world.agreement import CallAgreement
from traced.evaluation.figures import CycleFigures, as_json
from traced.evaluation.report import render, summary_table
from traced.evaluation.world_agreement import (
    HELD_OUT_CALLS,
    WorldFigures,
    agreement_json,
    agreement_lines,
    brief_lines,
    read_agreement,
    read_omitted,
    tool_agreements,
)
from traced.evaluation.world_bounds import disagreeing_tools, refuted_tools, tool_replay

GET_CALL = CallAgreement(
    task="1",
    tool="get <b>",
    is_write=False,
    is_answered=True,
    is_exact=True,
    fields=1.0,
    has_error_class=True,
    is_error=False,
    shows_state=False,
)
CALLS = [
    GET_CALL,
    dataclasses.replace(GET_CALL, task="2", is_exact=False, fields=0.5, shows_state=True),
    dataclasses.replace(GET_CALL, task="3", is_answered=False, is_exact=False, fields=0.0),
    dataclasses.replace(
        GET_CALL, task="4", tool="lend", is_write=True, is_error=True, has_error_class=False, is_exact=False
    ),
]


def test_shares_are_of_answered_calls_and_errors_and_states_of_their_own() -> None:
    rows = {row.tool: row for row in tool_agreements(CALLS)}
    assert list(rows) == ["get <b>", "lend", "all reads", "all writes"]
    reads = rows["all reads"]
    assert (reads.coverage.count, round(reads.coverage.share, 3)) == (3, 0.667)
    assert (reads.exact.count, reads.exact.share, reads.fields.share, reads.error_class.share) == (2, 0.5, 0.75, 1.0)
    assert (reads.states.count, reads.states.share, reads.errors.count) == (1, 0.0, 0)
    assert (rows["lend"].is_write, rows["lend"].errors.count, rows["lend"].errors.share) == (True, 1, 0.0)
    line = agreement_lines([rows["lend"]])[0]
    assert line.startswith("lend (writes): 1 of 1 calls answered, exact 0 % [")
    assert "get <b>: 2 of 3 calls answered, 1 not recorded, exact 50 % [" in agreement_lines([rows["get <b>"]])[0]


def test_tools_without_an_answer_share_a_line() -> None:
    silent = dataclasses.replace(GET_CALL, tool="find", is_answered=False, is_exact=False)
    lines = brief_lines(tool_agreements([*CALLS, silent, silent, dataclasses.replace(silent, tool="list")]))
    assert lines[0].startswith("get <b>: 2 of 3 answered, 1 not recorded; exact 50 % [")
    assert lines[1].startswith("lend (writes): 1 of 1 answered; exact 0 % [")
    assert lines[-1] == "none of the calls answered: find (2), list (1)"
    assert brief_lines(tool_agreements([silent]))[0] == "all reads: 0 of 1 answered, 1 not recorded"


def test_json_is_read_back_and_the_report_shows_every_tool() -> None:
    world = WorldFigures("d" * 64, 12, {HELD_OUT_CALLS: tool_agreements(CALLS)})
    assert read_agreement(json.loads(json.dumps(agreement_json(world.agreement)))) == world.agreement
    figures = CycleFigures("c", "acme", "bundled", 0, world=world)
    page = render(figures, {})
    assert "made of 12 conversations" in page
    assert "get &lt;b&gt;" in page
    assert "get <b>" not in page
    assert as_json(figures)["world"] == {"digest": "d" * 64, "conversations": 12, "omitted": []} | agreement_json(
        world.agreement
    )
    assert "World of acme: all reads of held out conversations: 2 of 3 answered" in str(
        summary_table(figures).renderables[0]
    )
    assert "The world" not in render(dataclasses.replace(figures, world=None), {})


def test_omitted_tools_are_read_back_and_named_with_their_evidence() -> None:
    omitted = disagreeing_tools(tool_agreements([*CALLS, dataclasses.replace(CALLS[1], task="5")]))
    assert [item.tool for item in omitted] == ["get <b>", "lend"]
    assert read_omitted(json.loads(json.dumps([dataclasses.asdict(item) for item in omitted]))) == omitted
    assert omitted[0].text.startswith("get <b>: of 3 answered left out calls 33 % [")
    world = WorldFigures("d" * 64, 12, {HELD_OUT_CALLS: tool_agreements(CALLS)}, omitted)
    assert "get &lt;b&gt;: of 3 answered" in render(CycleFigures("c", "acme", "bundled", 0, world=world), {})
    # So few wrong answers omit a tool, but refute none.
    assert not refuted_tools(tool_agreements(CALLS))


def test_a_tool_that_shows_wrong_states_after_writes_is_omitted_if_enough_reads_show_them() -> None:
    right = [dataclasses.replace(GET_CALL, task=str(number)) for number in range(100)]
    wrong = dataclasses.replace(GET_CALL, is_exact=False, shows_state=True)
    four, five = ([dataclasses.replace(wrong, task=f"w{number}") for number in range(count)] for count in (4, 5))
    assert not disagreeing_tools(tool_agreements([*right, *four]))
    (omitted,) = disagreeing_tools(tool_agreements([*right, *five]))
    assert ", states 0 % [" in omitted.text
    assert read_omitted([json.loads(json.dumps(dataclasses.asdict(omitted)))]) == [omitted]
    # The interval of two wrong ones of 18 reaches the bound.
    some = [dataclasses.replace(GET_CALL, task=f"s{number}", shows_state=True) for number in range(16)]
    assert not disagreeing_tools(tool_agreements([*right, *some, *four[:2]]))
    twelve = [dataclasses.replace(wrong, task=f"m{number}") for number in range(12)]
    (refuted,) = refuted_tools(tool_agreements([*right, *right, *twelve]))
    assert refuted.states.count == 12
    row = tool_agreements([*right, *four])[0]
    judged_row = tool_replay(row, HELD_OUT_CALLS)
    assert (judged_row.states.count, judged_row.states.share) == (4, 0)
    assert judged_row.fields.share == row.fields.share == 1 > judged_row.exact.share
    earlier = {name: value for name, value in dataclasses.asdict(omitted).items() if name != "states"}
    assert read_omitted([earlier])[0].states.count == 0
