"""The CLI as a user runs it: a process, its two streams and its exit code, and no call beyond this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.guard import sitecustomize


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The JSON object on the last line of stdout."""
        return json.loads(self.out.splitlines()[-1])


Traced = Callable[..., Ran]


@pytest.fixture
def traced(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """Run ``traced ARGS`` in an empty directory with its own data directory; ``env`` adds variables."""
    stray = tmp_path_factory.mktemp("stray") / "calls"
    guarded = {"PYTHONPATH": str(Path(sitecustomize.__file__).parent), sitecustomize.NOTED_IN: str(stray)}

    def run(*arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 240) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "traced", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | guarded | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert not stray.exists(), stray.read_text()
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
