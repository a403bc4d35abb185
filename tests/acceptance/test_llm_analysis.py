"""`traced analyze --analyst llm` and `--compare`, as a user runs them on imported conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import variants
from tests.acceptance.conftest import Ran, Traced
from tests.scripted_analyst import ANSWERING, LOOKING, Asked, Thinking
from tests.scripted_model import Refusal, Scripted, Sent, served

CANARY = "canary-in-the-ground-truth"
RUNS = 2


def analyze(traced: Traced, server: Scripted, *options: str, runs: int = RUNS) -> Ran:
    settings = (f'llm.base_url="{server.url}"', 'llm.model="scripted"', f"analysis.runs={runs}")
    return traced("analyze", *options, *(word for pair in settings for word in ("--set", pair)))


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
    with served(thinking, canaries=[CANARY, "tau-bench", ".json"]) as server:
        ran = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert ran.code == 0, ran.err
        assert thinking.kinds["label"] == 120 * 5
        again = analyze(traced, server, "--analyst", "llm", "--json", runs=0)
        assert again.json == ran.json
        assert sum(thinking.kinds.values()) == len(server.asked)
    assert {one["runs"] for one in ran.json["capabilities"]} == {5}
    assert {one["capability"] for one in ran.json["citations"]} == {LOOKING["name"], ANSWERING["name"]}
    assert len(ran.json["faults"]) == 80


def test_both_side_by_side_then_the_one_that_was_paid_for_already(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 4)
    named = {**LOOKING, "name": "tool-calling-precision"}
    with served(Thinking(candidates=[named, ANSWERING])) as server:
        both = analyze(traced, server, "--compare", "builtin,llm", "--json")
        assert both.code == 0, both.err
        asked = len(server.asked)
        shown = analyze(traced, server, "--compare", "llm,builtin")
        alone = analyze(traced, server, "--analyst", "llm", "--json")
        assert len(server.asked) == asked
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
    assert "Only llm: plain-answers" in shown.out
    assert "tool-calling-precision" in shown.out
    assert alone.json["analyst"] == "llm"
    assert alone.json["capabilities"] == [
        {**one, "cycle_id": alone.json["cycle"]} for one in told["sides"][1]["findings"]
    ]
    default = traced("analyze", "--json", "--set", f"analysis.runs={RUNS}").json
    assert [one["capability"] for one in default["capabilities"]] == [
        one["capability"] for one in told["sides"][0]["findings"]
    ]


@pytest.mark.parametrize("options", [("--compare", "builtin"), ("--compare", "llm,llm"), ("--analyst", "nobody")])
def test_who_is_no_analyst_is_a_wrong_usage(traced: Traced, options: tuple[str, ...]) -> None:
    ran = traced("analyze", *options)
    assert ran.code == 2, ran.err


def test_a_model_that_will_not_do_it_is_named_with_what_to_do(traced: Traced, tmp_path: Path) -> None:
    imported(traced, tmp_path, 2)

    def refusing(asked: Asked) -> Sent | None:
        return Refusal() if asked.kind == "label" else None

    with served(Thinking(refusing)) as server:
        ran = analyze(traced, server, "--analyst", "llm", "--json")
    assert ran.code == 1
    assert "could not be labelled in run" in ran.json["error"]["message"]
    assert "leave this trajectory out" in ran.json["error"]["hint"]
    assert "Traceback" not in ran.err
    nobody = traced("analyze", "--analyst", "llm", "--json")
    assert nobody.code in (1, 2)
    assert "llm" in nobody.json["error"]["message"] + nobody.json["error"]["hint"]
