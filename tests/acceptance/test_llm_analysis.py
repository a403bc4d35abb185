"""`traced analyze --analyst llm` and `--compare`, as a user runs them on imported conversations."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import variants
from tests.acceptance.conftest import Ran, Traced
from tests.scripted_analyst import ANSWERING, VERIFICATION, ScriptedQuestion, Thinking, labelled_cell
from tests.scripted_model import Refusal, Scripted, ScriptedReply, scripted_server

CANARY = "canary-in-the-ground-truth"
RUNS = 2
LONGEST = "structured-data-reasoning"  # of the builtin catalogue
ANSWERED, CONCURRENCY = 20, 8


def settings(server: Scripted, runs: int) -> list[str]:
    told = (f'llm.base_url="{server.url}"', 'llm.model="scripted"', f"analysis.runs={runs}")
    return [word for pair in told for word in ("--set", pair)]


def analyze(traced: Traced, server: Scripted, *options: str, runs: int = RUNS, columns: int = 200) -> Ran:
    return traced("analyze", *options, *settings(server, runs), env={"COLUMNS": str(columns)})


def imported(traced: Traced, tmp_path: Path, trials: int) -> Any:
    """So many variants of each of three recorded conversations, with something in all that is private."""
    records = json.loads(variants(tmp_path / "all.json").read_text())
    told = [{**one, "info": {**one["info"], "planted": CANARY}} for one in records if one["trial"] < trials]
    (tmp_path / "records.json").write_text(json.dumps(told))
    ran = traced("import", tmp_path / "records.json", "--json")
    assert ran.code == 0, ran.err
    return ran.json


def test_120_conversations_and_five_runs_of_their_own_accord(traced: Traced, tmp_path: Path) -> None:
    assert imported(traced, tmp_path, 40)["added"] == 120
    thinking = Thinking()
    with scripted_server(thinking, canaries=[CANARY, "tau-bench", ".json"]) as server:
        ran = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert ran.code == 0, ran.err
        assert thinking.kinds["label"] == 120 * 5
        again = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert again.json == ran.json
        assert sum(thinking.kinds.values()) == len(server.requests)
    assert {one["runs"] for one in ran.json["capabilities"]} == {5}
    assert {one["capability"] for one in ran.json["citations"]} == {VERIFICATION["name"], ANSWERING["name"]}
    assert len(ran.json["faults"]) == 80


def test_both_side_by_side_then_the_one_that_was_paid_for_already(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 4)
    named = {**VERIFICATION, "name": "tool-calling-precision"}
    with scripted_server(Thinking(candidates=[named, ANSWERING])) as server:
        both = analyze(traced, server, "--compare", "builtin,llm", "--json")
        assert both.code == 0, both.err
        asked = len(server.requests)
        shown = analyze(traced, server, "--compare", "llm,builtin")
        alone = analyze(traced, server, "--analyst", "llm", "--json")
        assert len(server.requests) == asked
    told = both.json["comparison"]
    assert told["trajectories"] == 12
    assert [side["analyst"] for side in told["sides"]] == ["builtin", "llm"]
    assert told["only"]["llm"] == ["plain-answers"]
    assert "tool-calling-precision" not in told["only"]["builtin"]
    (shared,) = [one for one in told["differences"] if one["capability"] == "tool-calling-precision"]
    assert (shared["analysts"], shared["both"]) == (["builtin", "llm"], 12)
    assert len(shared["examples"]) == min(shared["differ"], 5)
    for side in told["sides"]:
        assert {"delta_low", "delta_high", "coverage_low", "agreement", "retained"} <= set(side["findings"][0])
    for line in ("Proposed by llm only: plain-answers", "Retained by both: none", "Retained by llm only: none"):
        assert line in shown.out
    assert f"tool-calling-precision: labelled differently in {shared['differ']} of 12 trajectories" in shown.out
    one = shared["examples"][0]
    verdicts = f"llm: {one['llm'].upper()}, builtin: {one['builtin'].upper()}"
    assert f"{one['trajectory'][:16]}: {verdicts}" in shown.out
    assert re.search(r"\d+/32: labels: \d+ of 24", shown.err)  # on the way, not only at the end
    assert alone.json["analyst"] == "llm"
    assert alone.json["capabilities"] == [
        {**one, "cycle_id": alone.json["cycle"]} for one in told["sides"][1]["findings"]
    ]
    default = traced("analyze", "--json", "--set", f"analysis.runs={RUNS}").json
    assert [one["capability"] for one in default["capabilities"]] == [
        one["capability"] for one in told["sides"][0]["findings"]
    ]


def test_an_analysis_reads_well_on_80_columns(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 4)

    def instead(asked: ScriptedQuestion) -> ScriptedReply | None:
        if asked.kind == "blame" and "(This is call 0.)" in asked.text:
            return {"why": "It broke.", "fault": "infrastructure", "message": "m1"}
        if asked.kind == "label" and "I booked a flight" in asked.text and "(This is call 1.)" in asked.text:
            return Refusal()
        if asked.kind == "label":
            verdict = "LACKING" if "passenger name" in asked.text else "PRESENT"
            return {"cells": [labelled_cell(LONGEST, verdict, "2")]}
        return None

    with scripted_server(Thinking(instead, candidates=[{**VERIFICATION, "name": LONGEST}])) as server:
        ran = analyze(traced, server, "--analyst", "llm", columns=80)
        told = analyze(traced, server, "--analyst", "llm", "--json").json
    assert max(map(len, ran.out.split("Lacking:", maxsplit=1)[0].splitlines())) <= 80
    row, bounds = (line.split() for line in ran.out.splitlines()[3:5])
    assert row == [LONGEST, "1.00", "1.00", "2/2", "1.00", "yes"]
    assert bounds == ["[1.00,", "1.00]", "[1.00,", "1.00]"]
    assert f"Lacking: {LONGEST}\n  {LONGEST}: Choose the record" in ran.out
    cited = told["citations"][0]
    assert f"Evidence: message {cited['message']} of {cited['trajectory'][:16]}, " in ran.out
    assert "Failures: 6 caused by the agent; excluded, caused by others: 2 infrastructure\n" in ran.out
    (left_out,) = told["left_out"]
    assert (
        f"Not analysed: 1 trajectories could not be labelled ({left_out['trajectory'][:16]}). "
        "Reason for the first: the model" in ran.out
    )
    assert "it refused: I will not help with that.\n" in ran.out
    assert left_out["reason"] in ran.out


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_what_was_answered_before_a_sudden_end_is_not_paid_for_again(
    traced: Traced, tmp_path: Path, how: signal.Signals
) -> None:
    imported(traced, tmp_path, 4)
    thinking, working, going_on = Thinking(), threading.Event(), threading.Event()

    def halting(body: dict[str, Any], nth: int) -> ScriptedReply:
        if nth >= ANSWERED:
            working.set()
            assert going_on.wait(120)
        return thinking(body, nth)

    with scripted_server(halting) as server:
        command = [sys.executable, "-m", "traced", "analyze", "--analyst", "llm", *settings(server, RUNS)]
        with subprocess.Popen(command, cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE, text=True) as running:
            assert working.wait(120)
            running.send_signal(how)
            _, said = running.communicate(timeout=120)
        assert running.returncode in (130, -signal.SIGKILL)
        assert "Traceback" not in said
        assert len(server.requests) <= ANSWERED + CONCURRENCY
        going_on.set()
        ran = analyze(traced, server, "--analyst", "llm", "--json")
        assert ran.code == 0, ran.err
        asked = len(server.requests)
    undisturbed = 8 + 3 + 12 * RUNS  # whose fault, three to find capabilities, labels
    assert undisturbed < asked <= undisturbed + CONCURRENCY
    with sqlite3.connect(tmp_path / "traced-data" / "traced.db") as database:
        assert database.execute("SELECT count(*) FROM model_replies").fetchone()[0] == undisturbed


@pytest.mark.parametrize("options", [("--compare", "builtin"), ("--compare", "llm,llm"), ("--analyst", "nobody")])
def test_who_is_no_analyst_is_a_wrong_usage(traced: Traced, options: tuple[str, ...]) -> None:
    ran = traced("analyze", *options)
    assert ran.code == 2, ran.err


def test_a_model_that_will_not_do_it_is_named_with_what_to_do(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 2)

    def refusing(asked: ScriptedQuestion) -> ScriptedReply | None:
        return Refusal() if asked.kind == "label" else None

    with scripted_server(Thinking(refusing)) as server:
        ran = analyze(traced, server, "--analyst", "llm", "--json")
    assert ran.code == 1
    assert "none of the first 6 conversations could be labelled" in ran.json["error"]["message"]
    assert "another llm.model" in ran.json["error"]["hint"]
    assert "Traceback" not in ran.err
    nobody = traced("analyze", "--analyst", "llm", "--json")
    assert nobody.code in (1, 2)
    assert "llm" in nobody.json["error"]["message"] + nobody.json["error"]["hint"]
