"""``traced demo`` as a user runs it, at a size that shows the whole way but not the whole gain."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.acceptance.conftest import Traced

SMALL = {
    "collect.episodes": 160,
    "training.iterations": 2,
    "training.groups": 4,
    "training.rollouts": 4,
    "training.validation_seeds": 8,
    "gate.seeds": 24,
    "gate.max_rounds": 1,
    "composition.seeds": 16,
    "test.seeds": 20,
    "engine.start_timeout_s": 300,
}
KEYS = ["verdict", "self_check", "floor", "base", "composed", "gain", "ci", "test_seeds", "adapters", "capabilities"]
KEYS += ["rollouts", "seconds", "peak_rss_bytes"]
EPISODES = 64  # of the demo that is stopped while it collects
LINES = 400  # more than any run here writes to stderr

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1500)]


def settings(episodes: int = SMALL["collect.episodes"]) -> list[str]:
    return [
        word for key, value in (SMALL | {"collect.episodes": episodes}).items() for word in ("--set", f"{key}={value}")
    ]


def test_demo_runs_the_whole_cycle_and_leaves_its_evidence(traced: Traced, tmp_path: Path) -> None:
    result = traced("demo", "--yes", "--json", *settings(), timeout=1400)
    assert result.code == 0, result.err
    report = result.json
    routed = any(adapter["promoted"] for adapter in report["adapters"])
    composed = [*(["over_best_single", "composition"] * routed), "step"]
    validated = ["validation_episodes"] * bool(report["adapters"])
    assert [key for key in report if key != "routing"] == KEYS + validated + composed
    if routed:
        candidates = report["composition"]["candidates"]
        assert {"base", *(adapter["name"] for adapter in report["adapters"] if adapter["promoted"])} & {
            candidate["name"] for candidate in candidates
        }
    assert result.out.count("\n") == 1, "stdout holds more than the JSON object"
    assert 0 <= report["floor"] < report["base"] < 1
    assert report["peak_rss_bytes"] < 4 * 2**30
    failed_capabilities = {
        line.split(" failed at the stage ")[0] for line in result.err.splitlines() if " failed at the stage " in line
    }
    trained_capabilities = {adapter["capability"] for adapter in report["adapters"]}
    assert trained_capabilities | failed_capabilities, "no capability was retained"
    assert report["rollouts"] == 32 * len(trained_capabilities)
    for adapter in report["adapters"]:
        assert adapter["promoted"] == (adapter["gate"] == "pass")
        assert (adapter["alone"] is not None) == adapter["promoted"]
    page = tmp_path / "traced-data" / "runs" / "desk-bundled-0-1" / "report.html"
    assert "<h2>What the analysis found</h2>" in page.read_text()
    assert traced("status", "--json").code == 0


def test_without_docker_the_demo_stops_before_it_works(traced: Traced, tmp_path: Path) -> None:
    result = traced("demo", "--yes", env={"DOCKER_HOST": "unix:///nowhere/docker.sock"})
    assert result.code == 1
    assert "no Docker engine answers" in result.err
    assert "scripts/docker-engine.sh" in result.err
    assert "Traceback" not in result.err


def test_who_keeps_everything_to_decide_does_not_have_it_decided(traced: Traced) -> None:
    result = traced("demo", "--yes", "--keep")
    assert result.code == 1
    assert "use one of them" in result.err


def test_a_missing_model_is_named(traced: Traced, tmp_path: Path) -> None:
    result = traced("demo", "--yes", "--model", tmp_path / "nowhere")
    assert result.code == 1
    assert str(tmp_path / "nowhere") in result.err
    assert "Traceback" not in result.err


def lines_of(stream: IO[str]) -> Iterator[str]:
    for _ in range(LINES):
        line = stream.readline()
        if not line:
            return
        yield line


@pytest.mark.release
def test_stopped_while_it_collects_it_carries_on(traced: Traced, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "traced", "demo", "--yes", *settings(EPISODES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr is not None
        matches = (re.search(rf"(\d+)/{EPISODES}", line) for line in lines_of(demo.stderr))
        assert any(progress and 16 <= int(progress[1]) < EPISODES for progress in matches), (
            "it never got to its 16th episode"
        )
        children = psutil.Process(demo.pid).children(recursive=True)
        assert children
        demo.send_signal(signal.SIGTERM)
        rest = demo.stderr.read()
        assert demo.wait() == 128 + signal.SIGTERM, rest
    assert "no file is incomplete. To resume: traced demo --yes --set" in rest
    assert "Traceback" not in rest
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    carried_on = traced("collect", "--json", *settings(EPISODES), timeout=900)
    assert carried_on.code == 0, carried_on.err
    assert carried_on.json["cycle"] == "desk-bundled-0-1"
    first_line = next(line for line in carried_on.err.splitlines() if f"/{EPISODES}" in line)
    assert "success" not in first_line, "the first episodes were run again instead of being read back"
    message = "all episodes are from an earlier run, none was played"
    assert message not in carried_on.err
    repeated = traced("collect", "--episodes", str(EPISODES), *settings())
    assert message in repeated.err
    next_command = repeated.out.partition("Next: ")[2].split()
    assert next_command[:2] == ["traced", "analyze"]
    assert next_command[-2:] == ["--set", f"collect.episodes={EPISODES}"]
