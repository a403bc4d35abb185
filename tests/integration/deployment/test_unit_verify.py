"""systemd's own check of the units, and the verbs as a person types them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from traced.daemon.systemd import Machine, Unit, machine, render

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze; apt-get install systemd"),
]
SYSTEMD = machine().systemd


def verify(path: Path, *options: str) -> str:
    command = ["systemd-analyze", *options, "verify", str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(path.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return f"{done.returncode}{done.stdout}{done.stderr}"


@pytest.mark.parametrize("system", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_systemd_finds_nothing_wrong(tmp_path: Path, system: bool, gpu: bool) -> None:
    unit = Unit(
        python=Path(sys.executable),
        data_dir=Path("/var/lib/a b%c$f"),
        system=system,
        memory_max="24G",
        machine=Machine(SYSTEMD, "docker", gpu),
    )
    path = tmp_path / "traced.service"
    path.write_text(render(unit))
    assert verify(path, *([] if system else ["--user"])) == "0"


def test_a_mistake_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "traced.service"
    path.write_text(render(Unit(python=Path("/not/there"), data_dir=Path("/var/lib/traced"), system=True)))
    assert verify(path)[0] != "0"


def test_the_exposure_is_low(tmp_path: Path) -> None:
    """`systemd-analyze security` scores 0 (closed) to 10; an unconfined service has 9.6."""
    path = tmp_path / "traced.service"
    unit = Unit(Path(sys.executable), Path("/var/lib/traced"), system=True, machine=Machine(SYSTEMD, "docker", False))
    path.write_text(render(unit))
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-600:] + done.stderr


def test_the_verbs(tmp_path: Path) -> None:
    def traced(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "traced", "service", *words]
        environment = {"PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": str(tmp_path / "config"), "HOME": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    data = str(tmp_path / "data dir")
    dry_run = traced("install", "--user", "--dry-run", "--memory-max", "2G", "--data-dir", data)
    assert dry_run.returncode == 0, dry_run.stderr
    assert f'"--data-dir" "{data}"' in dry_run.stdout
    status = json.loads(traced("show", "--json", "--data-dir", data).stdout)
    assert (status["there"], status["ours"]) == (False, False)
    assert not (tmp_path / "config").exists()
    system = traced("install", "--system", "--dry-run", "--json")
    assert '"/var/lib/traced"' in json.loads(system.stdout)["unit"]
    refusal = traced("install", "--system", "--dry-run", "--data-dir", "/srv/x")
    assert (refusal.returncode, "--run-as" in refusal.stderr) == (1, True)
