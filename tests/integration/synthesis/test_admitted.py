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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.synthesizer.llm.prompt import example
from benchmarks.admission import unsound
from sandbox.admission import Thresholds, refusals
from sandbox.admission.checks import CHECK_NAMES
from sandbox.admission.report import MEANS
from tests.integration.synthesis.test_candidates import FAMILIES, NO_FILE, message_text, run_cycle
from tests.integration.synthesis.way import run_with_context
from tests.integration.synthesis.world import CANARIES, environments_of, fenced, fixture, prepared, refused_by, reports
from tests.scripted_model import scripted_server
from tests.unit.agents.synthesis.conversations import environment_class
from traced.config.settings import Settings
from traced.pipeline.admit import thresholds

pytestmark = [pytest.mark.docker, pytest.mark.usefixtures("image")]
ROOT = Path(__file__).parents[3]
SOUND = fixture("cloakroom")
KIND = SOUND.replace("round(0.4 * right, 3)", "round(0.1 + 0.4 * right, 3)")  # coming at all is worth a little
TIRED = """        RESETS[0] += 1
        if RESETS[0] > 900 and seed % 2:
            sum(range(12_000_000))
        rng = random.Random(seed)
"""
LOUD = "self.turn += 1\n        re.compile(f'a{self.turn}', re.DEBUG)"
CLOSEST = sorted(unsound(), key=lambda case: case.base == "cloakroom")  # with the target's tools, where there is one
FLAWED = {case.expected: case.source for case in CLOSEST} | {
    "latency": SOUND.replace("class Env", "RESETS = [0]\n\n\nclass Env", 1).replace(
        "        rng = random.Random(seed)\n", TIRED, 1
    ),
    "effects": SOUND.replace("self.turn += 1", LOUD, 1).replace("import random", "import random\nimport re", 1),
    "spread": SOUND,  # the base model cannot solve it
}
IN_TURN = {name: FLAWED[name] for name in CHECK_NAMES if name != "world"}


def sooner(settings: Settings) -> Thresholds:
    return replace(thresholds(settings), seeds=12, diversity_seeds=60, reset_seconds=0.05)


@pytest.mark.release
def test_a_file_that_each_check_refuses_in_turn_is_mended_until_it_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traced.pipeline.admit.thresholds", sooner)
    answers = [fenced(source) for source in [*IN_TURN.values(), KIND]]
    overrides = {"synthesis.starts": 1, "synthesis.repairs": len(IN_TURN)}
    with scripted_server(lambda body, nth: answers[nth], canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server, overrides)
        records = run_with_context(report["cycle"], tmp_path, server.url, overrides, environments_of)
        refusals = run_with_context(report["cycle"], tmp_path, server.url, overrides, refused_by)
    assert [name in checks for name, checks in zip(IN_TURN, refusals, strict=False)] == [True] * len(IN_TURN), refusals
    assert (refusals[-1], report["admitted"]) == ([], records[-1].hash)
    for body, (name, source) in zip(server.requests[1:], IN_TURN.items(), strict=True):
        assert f"Failed: {name} ({MEANS[name]})" in message_text(body)
        assert source.strip() in message_text(body, 2)
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
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["admitted"], [(check["name"], check["advice"]) for check in report["checks"] if not check["passed"]]
    tools = environment_class(example())().reset(0).tools
    assert {tool["function"]["name"] for tool in tools} == {"find_bikes", "book_repair", "hand_out", "order_part"}


def test_the_best_of_three_candidates_is_mended(tmp_path: Path) -> None:
    """Whichever of them comes first: one is no file, one does not run, one fails late."""
    candidates = [NO_FILE, fenced(IN_TURN["runs"]), fenced(IN_TURN["interface"])]
    overrides = {"synthesis.candidates": 3, "synthesis.starts": 1, "synthesis.repairs": 1}
    with scripted_server(lambda body, nth: candidates[nth] if nth < 3 else NO_FILE, canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server, overrides)
        refusals = run_with_context(report["cycle"], tmp_path, server.url, overrides, refused_by)
        records = run_with_context(report["cycle"], tmp_path, server.url, overrides, environments_of)
    assert report["reason"] == "admit: none of 4 candidate environments was admitted"
    assert sorted(refusals[:3]) == [["interface"], ["runs"], ["source"]]
    assert len(server.requests) == 4
    assert IN_TURN["interface"].strip() in message_text(server.requests[3], 2)
    assert "Failed: interface" in message_text(server.requests[3])
    assert records[3].repairs == records[refusals.index(["interface"])].hash


def test_nothing_of_a_file_that_reading_does_not_refuse_runs_outside_its_container(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    writes = f"(random,)[0]._os.open({str(marker)!r}, 0o101)\n"
    attack = SOUND.replace("\nTHINGS = ", f"\n{writes}THINGS = ", 1)
    overrides = {"synthesis.starts": 1, "synthesis.repairs": 0}
    with scripted_server(fenced(attack)) as server:
        admission = run_cycle(tmp_path, server, overrides)
        (report,) = run_with_context(admission["cycle"], tmp_path, server.url, overrides, reports)
    assert report.checks[0].passed
    assert set(refusals(report)) & {"runs", "effects"}
    assert not marker.exists()
    assert environment_class(attack)
    assert marker.exists(), "outside a container it would have been written"


FROM_WITHIN = ["fork_bomb", "memory_bomb", "endless_loop", "flood_of_lines", "leave_after_a_fake_score", "poison"]


def test_a_file_that_attacks_its_container_is_refused_and_repaired(tmp_path: Path) -> None:
    """The attacks of tests/data/attacks, past what reading finds."""
    code = "\n".join((FAMILIES / f"{name}.py").read_text() for name in ("escapes", "forgery", "resources"))
    start = "        NAMES or (random,)[0]._os.sys.modules['builtins'].exec(CODE, NAMES)\n        NAMES[{!r}]()\n"
    answers = []
    for attack in FROM_WITHIN:
        reset = start.format(attack) + "        rng = random.Random(seed)\n"
        source = SOUND.replace("        rng = random.Random(seed)\n", reset, 1)
        answers.append(source.replace("\nTHINGS = ", f"\nNAMES = {{}}\nCODE = {code!r}\nTHINGS = ", 1))
    overrides = {"synthesis.starts": 1, "synthesis.repairs": len(answers) - 1, "sandbox.call_seconds": 2}
    with scripted_server(lambda body, nth: fenced(answers[nth]), canaries=CANARIES) as server:
        report = run_cycle(tmp_path, server, overrides)
        judged_items = run_with_context(report["cycle"], tmp_path, server.url, overrides, reports)
    assert report["reason"] == f"admit: none of {len(answers)} candidate environments was admitted"
    assert all(report.checks[0].passed and not report.admitted for report in judged_items), "none was run"
    for nth, body in enumerate(server.requests[1:]):
        assert all(f"Failed: {name} ({MEANS[name]})" in message_text(body) for name in refusals(judged_items[nth]))


CUTS = [
    pytest.param("saved 2", marks=pytest.mark.release),
    "judging 1",
    pytest.param("kept 3", marks=pytest.mark.release),
]


@pytest.mark.parametrize("truncation", CUTS)
def test_a_way_that_is_killed_goes_on_and_asks_nothing_twice(tmp_path: Path, truncation: str) -> None:
    answers = [fenced(IN_TURN["runs"]), NO_FILE, fenced(IN_TURN["source"]), fenced(IN_TURN["runs"] + "\n# again\n")]
    overrides = {"synthesis.starts": 1, "synthesis.repairs": 3}
    with scripted_server(lambda body, nth: answers[nth], canaries=CANARIES) as server:
        cycle = prepared(tmp_path, server.url, overrides)
        assert in_process(tmp_path, server.url, truncation, cycle, overrides).returncode == -signal.SIGKILL
        second = in_process(tmp_path, server.url, "-", cycle, overrides)
        assert second.returncode == 0, second.stderr
        refusals = run_with_context(cycle, tmp_path, server.url, overrides, refused_by)
    report = json.loads(second.stdout.splitlines()[-1])
    assert report["reason"] == "admit: none of 4 candidate environments was admitted"
    assert refusals == [["runs"], ["source"], ["source"], ["runs"]]
    requests = Counter(json.dumps(body, sort_keys=True) for body in server.requests)
    assert (len(server.requests), set(requests.values())) == (4, {1})


def in_process(
    directory: Path, url: str, truncation: str, cycle: str, overrides: Mapping[str, Any]
) -> "subprocess.CompletedProcess[str]":
    pairs = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "tests.integration.synthesis.way", str(directory), url, truncation, cycle, *pairs]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
