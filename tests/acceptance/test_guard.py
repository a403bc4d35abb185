"""What a test starts of its own accord is watched as ``traced`` is: a call beyond this machine fails the test."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.acceptance.conftest import refuse

ROOT = Path(__file__).parents[2]
CALL = "import socket; socket.socket().connect(('192.0.2.7', 80))"
CHILD = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
LOOKS_FINE = f"""
import subprocess, sys
from tests.acceptance.conftest import stray_calls as stray_calls

def test_that_looks_fine():
    subprocess.run([sys.executable, "-c", {CALL!r}], check=False)
"""


@pytest.mark.parametrize("through", [[], ["-c", CHILD]])
def test_a_call_of_any_process_is_noted_and_told_once(stray_calls: Path, through: list[str]) -> None:
    subprocess.run([sys.executable, *through, "-c", CALL], stderr=subprocess.DEVNULL, check=False)
    with pytest.raises(AssertionError, match=r"connected to \('192\.0\.2\.7', 80\)"):
        refuse(stray_calls)
    refuse(stray_calls)


def test_what_was_noted_fails_the_test_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LOOKS_FINE)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout
    assert "1 passed, 1 error" in done.stdout
    assert "connected to ('192.0.2.7', 80)" in done.stdout
