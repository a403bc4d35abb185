"""A model's files through real admission: refused for every reason there is, mended each time, admitted at the end.

The containers are real, the model is a script over HTTP, and the base model whose rewards are asked for at the end is
the bundled one.
"""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agents.synthesizer.llm.prompt import example
from sandbox.admission import refusals
from sandbox.admission.admit import NAMES
from sandbox.admission.report import MEANS
from tests.integration.synthesis.test_candidates import NO_FILE, said, worked
from tests.integration.synthesis.way import on
from tests.integration.synthesis.world import CANARIES, fenced, fixture, made, prepared, refused_by, reports
from tests.scripted_model import served
from tests.unit.agents.synthesis.conversations import environment_class

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
ROOT = Path(__file__).parents[3]
SOUND = fixture("cloakroom")
KIND = SOUND.replace("round(0.4 * right, 3)", "round(0.1 + 0.4 * right, 3)")  # coming at all is worth a little
TIRED = """        RESETS[0] += 1
        if RESETS[0] > 1200:
            sum(range(30_000_000))
        rng = random.Random(seed)
"""
IN_TURN = {
    "source": fixture("imports_the_host"),
    "runs": fixture("raises_in_step"),
    "determinism": fixture("draws_from_the_module"),
    "oracle": fixture("oracle_gives_up"),
    "diversity": fixture("names_only"),
    "floor": fixture("pays_for_effort"),
    "exploits": fixture("pays_for_promises"),
    "interface": fixture("answers_one_call"),
    "leak": fixture("nobody_could_know"),
    "latency": SOUND.replace("class Env", "RESETS = [0]\n\n\nclass Env", 1).replace(
        "        rng = random.Random(seed)\n", TIRED, 1
    ),
    "effects": SOUND.replace("self.turn += 1", "self.turn += 1\n        (random,)[0]._os.listdir('/')", 1),
    "spread": SOUND,
}


def test_a_file_that_each_check_refuses_in_turn_is_mended_until_it_is_admitted(tmp_path: Path) -> None:
    answers = [fenced(source) for source in [*IN_TURN.values(), KIND]]
    overrides = {"synthesis.starts": 1, "synthesis.repairs": len(IN_TURN), "admission.seeds": 12}
    assert list(IN_TURN) == list(NAMES)
    with served(lambda body, nth: answers[nth], canaries=CANARIES) as server:
        told = worked(tmp_path, server, overrides)
        records = on(told["cycle"], tmp_path, server.url, overrides, made)
        refused = on(told["cycle"], tmp_path, server.url, overrides, refused_by)
    assert [name in checks for name, checks in zip(IN_TURN, refused, strict=False)] == [True] * len(IN_TURN), refused
    assert (refused[-1], told["admitted"]) == ([], records[-1].hash)
    for body, (name, source) in zip(server.asked[1:], IN_TURN.items(), strict=True):
        assert f"Failed: {name} ({MEANS[name]})" in said(body)
        assert source.strip() in said(body, 2)
    assert [record.repairs for record in records] == [None, *(record.hash for record in records[:-1])]
    assert all(
        record.source_code.startswith("# Written by scripted for finding-out-first: start 1, ") for record in records
    )


def test_the_worked_example_is_admitted(tmp_path: Path) -> None:
    assert len(example().splitlines()) < 200
    file = tmp_path / "example.py"
    file.write_text(example(), "utf-8")
    command = [sys.executable, "-m", "traced", "admit", str(file), "--json", "--data-dir", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["admitted"], [(check["name"], check["advice"]) for check in told["checks"] if not check["passed"]]
    tools = environment_class(example())().reset(0).tools
    assert {tool["function"]["name"] for tool in tools} == {"find_bikes", "book_repair", "hand_out", "order_part"}


def test_the_best_of_three_candidates_is_mended(tmp_path: Path) -> None:
    """Whichever of them comes first: one is no file, one does not run, one fails late."""
    candidates = [NO_FILE, fenced(IN_TURN["runs"]), fenced(IN_TURN["interface"])]
    overrides = {"synthesis.candidates": 3, "synthesis.starts": 1, "synthesis.repairs": 1}
    with served(lambda body, nth: candidates[nth] if nth < 3 else NO_FILE, canaries=CANARIES) as server:
        told = worked(tmp_path, server, overrides)
        refused = on(told["cycle"], tmp_path, server.url, overrides, refused_by)
        records = on(told["cycle"], tmp_path, server.url, overrides, made)
    assert told["reason"] == "admit: none of 4 candidate environments was admitted"
    assert sorted(refused[:3]) == [["interface"], ["runs"], ["source"]]
    assert len(server.asked) == 4
    assert IN_TURN["interface"].strip() in said(server.asked[3], 2)
    assert "Failed: interface" in said(server.asked[3])
    assert records[3].repairs == records[refused.index(["interface"])].hash


def test_nothing_of_a_file_that_reading_does_not_refuse_runs_outside_its_container(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    writes = f"(random,)[0]._os.open({str(marker)!r}, 0o101)\n"
    attack = SOUND.replace("\nTHINGS = ", f"\n{writes}THINGS = ", 1)
    overrides = {"synthesis.starts": 1, "synthesis.repairs": 0}
    with served(fenced(attack)) as server:
        told = worked(tmp_path, server, overrides)
        (report,) = on(told["cycle"], tmp_path, server.url, overrides, reports)
    assert report.checks[0].passed
    assert set(refusals(report)) & {"runs", "effects"}
    assert not marker.exists()
    assert environment_class(attack)
    assert marker.exists(), "outside a container it would have been written"


CUTS = ["kept 2", "saved 2", "judging 1", "judging 2", "kept 3"]


@pytest.mark.parametrize("cut", CUTS)
def test_a_way_that_is_killed_goes_on_and_asks_nothing_twice(tmp_path: Path, cut: str) -> None:
    answers = [fenced(IN_TURN["runs"]), NO_FILE, fenced(IN_TURN["source"]), fenced(IN_TURN["runs"] + "\n# again\n")]
    overrides = {"synthesis.starts": 1, "synthesis.repairs": 3}
    with served(lambda body, nth: answers[nth], canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url, overrides)
        assert in_process(tmp_path, server.url, cut, cycle, overrides).returncode == -signal.SIGKILL
        second = in_process(tmp_path, server.url, "-", cycle, overrides)
        assert second.returncode == 0, second.stderr
        refused = on(cycle, tmp_path, server.url, overrides, refused_by)
    told = json.loads(second.stdout.splitlines()[-1])
    assert told["reason"] == "admit: none of 4 candidate environments was admitted"
    assert refused == [["runs"], ["source"], ["source"], ["runs"]]
    requests = Counter(json.dumps(body, sort_keys=True) for body in server.asked)
    assert (len(server.asked), set(requests.values())) == (4, {1})


def in_process(
    directory: Path, url: str, cut: str, cycle: str, overrides: Mapping[str, Any]
) -> "subprocess.CompletedProcess[str]":
    pairs = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "tests.integration.synthesis.way", str(directory), url, cut, cycle, *pairs]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
