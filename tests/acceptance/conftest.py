"""The CLI as a user runs it: a process, its two streams and its exit code."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


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
def traced(tmp_path: Path) -> Traced:
    """Run ``traced ARGS`` in an empty directory with its own data directory; ``env`` adds variables."""

    def run(*arguments: str | Path, env: dict[str, str] | None = None, timeout: float = 240) -> Ran:
        done = subprocess.run(
            [sys.executable, "-m", "traced", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"} | (env or {}),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run
