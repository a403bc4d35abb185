"""``traced admit FILE.py``: any single-file environment is judged with evidence, with no store, cycle or model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.admission.checks import CHECK_NAMES
from sandbox.docker_engine import connect, find_orphans, process_identity
from sandbox.hashing import environment_hash
from sandbox.image import ensure_image
from sandbox.policy import LABEL_PROCESS
from tests.acceptance.conftest import Traced
from traced.cli.admission import OWNER

LAMP_SHOP = Path(__file__).parents[1] / "data/environments/lamp_shop.py"
NO_DOCKER = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


@pytest.fixture
def image() -> None:
    ensure_image(build_missing=True)


@pytest.fixture
def broken_environment(tmp_path: Path) -> Path:
    """The lamp shop, which pays everybody, draws from a set and says so to the terminal."""
    source = LAMP_SHOP.read_text()
    for old, new in [
        ("        right = sum(", "        return Score(1.0, True, {})\n        right = sum("),
        ('KINDS = ["lamp"', 'KINDS = [*{"lamp", "bed", "bath", "\\x1b[31mbar", "tap"}, "lamp"'),
    ]:
        assert old in source
        source = source.replace(old, new)
    file = tmp_path / "broken.py"
    file.write_text(source)
    return file


@pytest.mark.docker
@pytest.mark.usefixtures("image")
def test_a_sound_environment_is_admitted_as_far_as_could_be_checked(traced: Traced, tmp_path: Path) -> None:
    result = traced("admit", LAMP_SHOP, "--json", "--html", "report.html")
    assert (result.code, result.err) == (0, "")
    report = json.loads(result.out)  # nothing but one object
    assert report["verdict"] == "admitted as far as could be checked"
    assert [check["check"] for check in report["not_checked"]] == ["interface", "spread"]
    assert all(check["passed"] for check in report["checks"])
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "Admitted as far as could be checked" in page
    assert report["environment"] in page
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]  # no store was made
    assert find_orphans(OWNER) == []


@pytest.mark.docker
@pytest.mark.usefixtures("image")
def test_a_broken_one_is_refused_with_what_to_change(traced: Traced, broken_environment: Path) -> None:
    result = traced("admit", broken_environment)
    assert result.code == 1, result.err
    assert "broken.py: Refused" in result.out
    output = " ".join(result.out.split())
    assert "played in a second process with another hash seed, gives other bytes" in output
    assert "Sort sets before they are walked or drawn from" in output
    assert "An agent that says nothing (empty) reaches mean reward 1 and success rate 1" in output
    assert "2 others are rewarded for the same cause, because nothing has to be done: refusing, random." in output
    assert "\x1b" not in result.out
    assert result.err == ""


@pytest.mark.docker
@pytest.mark.usefixtures("image")
def test_a_file_is_compared_with_a_target_where_one_is_named(traced: Traced) -> None:
    result = traced("admit", LAMP_SHOP, "--target", "desk", "--json")
    assert result.code == 1, result.err
    failed_checks = [check for check in result.json["checks"] if not check["passed"]]
    assert [check["name"] for check in failed_checks] == ["interface"]
    assert "These tools differ from the target's: exchange_item, get_order" in failed_checks[0]["advice"][0]


@pytest.mark.docker
@pytest.mark.usefixtures("image")
def test_a_terminal_shows_which_check_is_under_way(tmp_path: Path) -> None:
    terminal, child_terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "traced", "admit", str(LAMP_SHOP)],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=child_terminal,
    ) as running:
        os.close(child_terminal)
        progress = b"".join(_read_all(terminal)).decode("utf-8", "replace")
        assert running.wait(120) == 0
    assert "runs: two seeds come through" in progress
    assert "Admitted" not in progress  # results go to stdout


def _read_all(terminal: int) -> Iterator[bytes]:
    try:
        while piece := os.read(terminal, 4096):
            yield piece
    except OSError:  # Linux: the other side has closed
        pass
    finally:
        os.close(terminal)


@pytest.mark.docker
@pytest.mark.usefixtures("image")
def test_a_package_that_was_exported_is_judged_by_its_environment(traced: Traced, tmp_path: Path) -> None:
    assert traced("export", LAMP_SHOP, "--to", "openenv", "--into", "lamps").code == 0
    (tmp_path / "lamps/README.md").write_text("mine\n")
    result = traced("admit", "lamps", "--json")
    assert result.code == 0, result.err
    assert result.json["environment"] == environment_hash(LAMP_SHOP.read_text())
    assert result.json["changed"] == ["README.md has changed since the export; this command does not check it"]


@pytest.mark.parametrize("package", ["maze", "maze/"])
def test_another_projects_package_is_not_judged_and_says_why(traced: Traced, tmp_path: Path, package: str) -> None:
    (tmp_path / "maze").mkdir()
    (tmp_path / "maze/maze.py").write_text(
        "import verifiers as vf\n\n\ndef load_environment():\n    return vf.ToolEnv()\n"
    )
    result = traced("admit", package, env=NO_DOCKER)
    assert result.code == 3, result.err
    assert f"maze: Not judged: none of {len(CHECK_NAMES)} checks could be made" in result.out
    assert "determinism" in result.out.partition("Not checked")[2]
    assert "efused" not in result.out
    assert traced("admit", package, "--json", env=NO_DOCKER).json["verdict"] == "not judged"


def test_without_docker_the_next_command_is_named(traced: Traced) -> None:
    result = traced("admit", LAMP_SHOP, "--json", env=NO_DOCKER)
    assert result.code == 3  # a refusal is 1
    error = json.loads(result.out)["error"]
    assert error["type"] == "EngineDown"
    assert "scripts/docker-engine.sh" in error["hint"]
    assert "scripts/docker-engine.sh" in result.err


def test_a_file_that_cannot_be_judged_is_refused_before_anything_runs(traced: Traced) -> None:
    result = traced("admit", "gone.py", "--json", env=NO_DOCKER)
    assert result.code == 3
    assert json.loads(result.out)["error"]["message"] == "the file gone.py does not exist"
    assert "Try: check the path" in result.err


def test_a_folder_without_python_is_no_package_but_perhaps_a_capabilitys_namesake(
    traced: Traced, tmp_path: Path
) -> None:
    (tmp_path / "lamps").mkdir()
    (tmp_path / "lamps/notes.txt").write_text("mine\n")
    result = traced("admit", "lamps", env=NO_DOCKER)
    assert result.code == 3
    assert "traced collect" in result.err
    assert "holds no environment" in traced("admit", "lamps/", env=NO_DOCKER).err


@pytest.mark.docker
@pytest.mark.usefixtures("image")
@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_its_containers(tmp_path: Path, signal_number: signal.Signals, code: int) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text(
        LAMP_SHOP.read_text().replace(
            "    def step(", "    def step(self, message):\n        while True:\n            pass\n\n    def _step(", 1
        )
    )
    # A limit on calls that a busy machine does not reach before the signal.
    command: list[str | Path] = [sys.executable, "-m", "traced", "admit", endless, "--set", "sandbox.call_seconds=120"]
    # The tests themselves may run under nohup, and traced keeps a SIGHUP ignored that was ignored before.
    command = ["env", "--default-signal=HUP", *command]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    client = connect()
    mine = {"label": [f"{LABEL_PROCESS}={process_identity(running.pid)}"]}
    try:
        while len(client.containers.list(filters=mine, ignore_removed=True)) < 2:
            assert running.poll() is None
        running.send_signal(signal_number)
        assert running.wait(60) == code
        assert client.containers.list(all=True, filters=mine, ignore_removed=True) == []
    finally:
        running.kill()
        running.communicate()
        client.close()


def test_options_that_would_do_nothing_are_refused(traced: Traced) -> None:
    for arguments in (["lamps", "--html", "a.html"], [LAMP_SHOP, "--model", "bundled"]):
        result = traced("admit", *arguments)
        assert result.code == 2, result.err
        assert "only" in result.err
