"""The CLI as a user runs it: a process, its two streams and its exit code, and no call beyond this machine.

The guard (tests/guard) stands in the environment of every test of this folder, so it is in each process that a test
starts, by ``traced`` or of its own, and in what these start; a call that it notes fails the test when it ends, if not
before.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.guard import sitecustomize
from tests.unit.maintenance.place import loose_entries


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Traced = Callable[..., CommandResult]


@pytest.fixture(autouse=True)
def stray_calls(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file in which all processes record network calls beyond this machine."""
    calls_file = tmp_path_factory.mktemp("stray") / "calls"
    monkeypatch.setenv("PYTHONPATH", str(Path(sitecustomize.__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv(sitecustomize.NOTED_IN, str(calls_file))
    yield calls_file
    refuse(calls_file)


def refuse(calls_file: Path) -> None:
    """Fail when a stray call was recorded, and delete the record."""
    if calls_file.exists():
        calls = calls_file.read_text()
        calls_file.unlink()
        raise AssertionError(calls)


@pytest.fixture
def traced(tmp_path: Path, stray_calls: Path) -> Traced:
    """Run ``traced ARGS`` in an empty directory with its own data directory; ``env`` adds variables, PYTHONPATH too.

    The commands run under umask 0, and must nevertheless write nothing that other users can write.
    """

    def run(
        *arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 240, stdin: str = ""
    ) -> CommandResult:
        env = env or {}
        path = os.pathsep.join(filter(None, (os.environ["PYTHONPATH"], env.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-m", "traced", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | env | {"PYTHONPATH": path},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            umask=0,
        )
        refuse(stray_calls)
        assert not loose_entries(tmp_path / "traced-data", 0o022)
        return CommandResult(done.returncode, done.stdout, done.stderr)

    return run
