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
from tests.acceptance.conftest import CommandResult, Traced
from tests.scripted_analyst import ANSWERING, VERIFICATION, ScriptedQuestion, Thinking, labelled_cell
from tests.scripted_analyst import row as row_of
from tests.scripted_model import Refusal, Scripted, ScriptedReply, scripted_server
from traced.targets.conversation_target import HELD_OUT, TRAIN, ConversationTarget

CANARY = "canary-in-the-ground-truth"
RUNS = 2
LONGEST_NAME = "structured-data-reasoning"  # of the builtin catalogue
ANSWERED_CALLS, CONCURRENCY = 4, 8
BY_PACK = ("critique", "label")


def settings(server: Scripted, runs: int) -> list[str]:
    pairs = (f'llm.base_url="{server.url}"', 'llm.model="scripted"', f"analysis.runs={runs}")
    return [word for pair in pairs for word in ("--set", pair)]


def analyze(traced: Traced, server: Scripted, *options: str, runs: int = RUNS, columns: int = 200) -> CommandResult:
    return traced("analyze", *options, *settings(server, runs), env={"COLUMNS": str(columns)})


def imported(traced: Traced, tmp_path: Path, trials: int) -> Any:
    """Import ``trials`` variants of each of three recorded conversations, each with a canary in its private part."""
    records = json.loads(variants(tmp_path / "all.json").read_text())
    selected = [
        {**record, "info": {**record["info"], "planted": CANARY}} for record in records if record["trial"] < trials
    ]
    (tmp_path / "records.json").write_text(json.dumps(selected))
    result = traced("import", tmp_path / "records.json", "--json")
    assert result.code == 0, result.err
    return result.json


def test_120_conversations_and_five_runs_of_their_own_accord(traced: Traced, tmp_path: Path) -> None:
    assert imported(traced, tmp_path, 40)["added"] == 120
    thinking = Thinking()
    with scripted_server(thinking, canaries=[CANARY, "tau-bench", ".json"]) as server:
        result = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert result.code == 0, result.err
        # Thirty packs of a task's conversations; eight of them, with thirty conversations, are labelled twice.
        assert thinking.kinds == {"critique": 20, "aggregate": 1, "label": 30 + 8}
        repeated = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert repeated.json == result.json
        assert sum(thinking.kinds.values()) == len(server.requests)
    assert {row["runs"] for row in result.json["capabilities"]} == {2}
    assert "Estimate: 120 conversations, about 59 requests (at most 171)" in " ".join(result.err.split())
    assert result.json["figures"]["estimate"]["requests"] == sum(thinking.kinds.values())
    assert {row["capability"] for row in result.json["citations"]} == {VERIFICATION["name"], ANSWERING["name"]}
    assert len(result.json["faults"]) == 80


def test_both_side_by_side_then_the_one_that_was_paid_for_already(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 4)
    candidate = {**VERIFICATION, "name": "tool-calling-precision"}
    with scripted_server(Thinking(candidates=[candidate, ANSWERING])) as server:
        comparison = analyze(traced, server, "--compare", "builtin,llm", "--json")
        assert comparison.code == 0, comparison.err
        request_count = len(server.requests)
        text_result = analyze(traced, server, "--compare", "llm,builtin")
        analysis = analyze(traced, server, "--analyst", "llm", "--json")
        assert len(server.requests) == request_count
    report = comparison.json["comparison"]
    assert report["trajectories"] == 12
    assert [side["analyst"] for side in report["sides"]] == ["builtin", "llm"]
    assert report["only"]["llm"] == ["plain-answers"]
    assert "tool-calling-precision" not in report["only"]["builtin"]
    (shared,) = [row for row in report["differences"] if row["capability"] == "tool-calling-precision"]
    assert (shared["analysts"], shared["both"]) == (["builtin", "llm"], 12)
    assert len(shared["examples"]) == min(shared["differ"], 5)
    for side in report["sides"]:
        assert {"delta_low", "delta_high", "coverage_low", "agreement", "retained"} <= set(side["findings"][0])
    for line in ("Proposed by llm only: plain-answers", "Retained by both: none", "Retained by llm only: none"):
        assert line in text_result.out
    assert f"tool-calling-precision: labelled differently in {shared['differ']} of 12 trajectories" in text_result.out
    row = shared["examples"][0]
    verdicts = f"llm: {row['llm'].upper()}, builtin: {row['builtin'].upper()}"
    assert f"{row['trajectory'][:16]}: {verdicts}" in text_result.out
    assert re.search(r"\d+/5: labels: \d+ of 3", text_result.err)  # on the way, not only at the end
    assert analysis.json["analyst"] == "llm"
    assert analysis.json["capabilities"] == [
        {**row, "cycle_id": analysis.json["cycle"]} for row in report["sides"][1]["findings"]
    ]
    default = traced("analyze", "--json", "--set", f"analysis.runs={RUNS}").json
    assert [row["capability"] for row in default["capabilities"]] == [
        row["capability"] for row in report["sides"][0]["findings"]
    ]


def test_an_analysis_reads_well_on_80_columns(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 4)

    def replacement(question: ScriptedQuestion) -> ScriptedReply | None:
        texts = {name: question.conversations[name] for name in question.subjects} if question.kind in BY_PACK else {}
        if question.kind == "critique":
            answer = Thinking().critique(question)
            for critique in answer["critiques"]:
                if "(This is call 0.)" in texts[critique["conversation"]]:
                    critique |= {"why": "It broke.", "fault": "infrastructure", "message": "m1", "steps": []}
            return answer
        if question.kind != "label":
            return None
        if any("I booked a flight" in text and "(This is call 1.)" in text for text in texts.values()):
            return Refusal()
        verdicts = {name: "LACKING" if "passenger name" in text else "PRESENT" for name, text in texts.items()}
        rows = [row_of(name, [labelled_cell(LONGEST_NAME, verdict, "2")]) for name, verdict in verdicts.items()]
        return {"rows": rows}

    with scripted_server(Thinking(replacement, candidates=[{**VERIFICATION, "name": LONGEST_NAME}])) as server:
        result = analyze(traced, server, "--analyst", "llm", columns=80)
        report = analyze(traced, server, "--analyst", "llm", "--json").json
    assert max(map(len, result.out.split("Lacking:", maxsplit=1)[0].splitlines())) <= 80
    row, bounds = (line.split() for line in result.out.splitlines()[3:5])
    assert row == [LONGEST_NAME, "1.00", "1.00", "2/2", "1.00", "yes"]
    assert bounds == ["[1.00,", "1.00]", "[1.00,", "1.00]"]
    assert f"Lacking: {LONGEST_NAME}\n  {LONGEST_NAME}: {VERIFICATION['description']}" in result.out
    citation = report["citations"][0]
    assert f"Evidence: message {citation['message']} of {citation['trajectory'][:16]}, " in result.out
    assert "Failures: 6 caused by the agent; excluded, caused by others: 2 infrastructure\n" in result.out
    (left_out,) = report["left_out"]
    assert (
        f"Not analysed: 1 trajectories could not be labelled ({left_out['trajectory'][:16]}). "
        "Reason for the first: the model" in result.out
    )
    assert "it refused: I will not help with that.\n" in result.out
    assert left_out["reason"] in result.out


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "kill"])
def test_what_was_answered_before_a_sudden_end_is_not_paid_for_again(
    traced: Traced, tmp_path: Path, signal_number: signal.Signals
) -> None:
    imported(traced, tmp_path, 4)
    thinking, working, going_on = Thinking(), threading.Event(), threading.Event()

    def halting(body: dict[str, Any], nth: int) -> ScriptedReply:
        if nth >= ANSWERED_CALLS:
            working.set()
            assert going_on.wait(120)
        return thinking(body, nth)

    with scripted_server(halting) as server:
        command = [sys.executable, "-m", "traced", "analyze", "--analyst", "llm", *settings(server, RUNS)]
        with subprocess.Popen(command, cwd=tmp_path, env=os.environ, stderr=subprocess.PIPE, text=True) as running:
            assert working.wait(120)
            running.send_signal(signal_number)
            _, stderr = running.communicate(timeout=120)
        assert running.returncode in (130, -signal.SIGKILL)
        assert "Traceback" not in stderr
        assert len(server.requests) <= ANSWERED_CALLS + CONCURRENCY
        going_on.set()
        result = analyze(traced, server, "--analyst", "llm", "--json")
        assert result.code == 0, result.err
        request_count = len(server.requests)
    undisturbed = 2 + 1 + 3 * RUNS  # critiques of two tasks' failures, their capabilities, labels of three tasks
    assert undisturbed < request_count <= undisturbed + CONCURRENCY
    with sqlite3.connect(tmp_path / "traced-data" / "traced.db") as database:
        assert database.execute("SELECT count(*) FROM model_replies").fetchone()[0] == undisturbed


@pytest.mark.parametrize("options", [("--compare", "builtin"), ("--compare", "llm,llm"), ("--analyst", "nobody")])
def test_who_is_no_analyst_is_a_wrong_usage(traced: Traced, options: tuple[str, ...]) -> None:
    result = traced("analyze", *options)
    assert result.code == 2, result.err


def test_a_model_that_will_not_do_it_is_named_with_what_to_do(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 2)

    def refusing(request_count: ScriptedQuestion) -> ScriptedReply | None:
        return Refusal() if request_count.kind == "label" else None

    with scripted_server(Thinking(refusing)) as server:
        result = analyze(traced, server, "--analyst", "llm", "--json")
    assert result.code == 1
    assert "1 of 6 conversations could not be labelled, which is more than one in 10" in result.json["error"]["message"]
    assert "another llm.model" in result.json["error"]["hint"]
    assert "Traceback" not in result.err
    nobody = traced("analyze", "--analyst", "llm", "--json")
    assert nobody.code in (1, 2)
    assert "llm" in nobody.json["error"]["message"] + nobody.json["error"]["hint"]


def test_no_prompt_has_a_conversation_that_is_held_out(traced: Traced, tmp_path: Path) -> None:
    records = [record for record in json.loads(variants(tmp_path / "all.json").read_text()) if record["trial"] < 12]
    tasks = {record["task_id"] for record in records}
    targets = (ConversationTarget(f"acme-{number}", 0.25) for number in range(1000))
    acme = next(target for target in targets if all(target.split(str(task)) == TRAIN for task in tasks))
    held_out_task = next(number for number in range(1000, 2000) if acme.split(str(number)) == HELD_OUT)
    held_out = [
        {**record, "task_id": held_out_task, "traj": [with_canary(message) for message in record["traj"]]}
        for record in records
    ]
    (tmp_path / "records.json").write_text(json.dumps(records + held_out))
    # The script's labels have no contrast: whatever it names is retained.
    bounds = [f"analysis.{name}=0" for name in ("delta", "rho", "consistency", "min_agreement")]
    pairs = [f"target.name={acme.name}", "target.kind=recorded", *bounds]
    target = [word for pair in pairs for word in ("--set", pair)]
    assert traced("import", tmp_path / "records.json", *target, "--json").json["added"] == 2 * len(records)
    with scripted_server(Thinking(), canaries=[CANARY]) as server:
        result = analyze(traced, server, "--analyst", "llm", "--json", *target)
        assert result.code == 0, result.err
        request_count = len(server.requests)
        server.script = lambda body, nth: "```python\nclass Environment:\n    pass\n```"
        options = ("--set", "analysis.analyst=llm", "--set", "synthesis.starts=1", "--set", "synthesis.repairs=0")
        capability = next(row["capability"] for row in result.json["capabilities"] if row["retained"])
        command = ("synthesize", capability, "--synthesizer", "llm", *target, *options, *settings(server, RUNS))
        synthesized = traced(*command)
        assert len(server.requests) > request_count > 0, synthesized.err


def with_canary(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": f"{message.get('content') or ''} {CANARY}"}
