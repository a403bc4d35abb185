"""The rule of tests/conftest.py on skips, checked on a test suite created here."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIP = """
import pytest

@pytest.mark.{mark}
def test_it():
    pytest.skip("no engine here")

@pytest.mark.xfail(reason="known")
def test_expected_failure():
    assert False
"""
LONG = """
import pytest

@pytest.mark.release
def test_it():
    assert False
"""
SUITE = {
    "integration/test_plain.py": SKIP.format(mark="other"),
    "integration/test_optional.py": SKIP.format(mark="optional"),
    "integration/test_module.py": 'import pytest\npytest.skip("nothing here", allow_module_level=True)\n',
    "acceptance/test_long.py": LONG,
    "acceptance/test_plain.py": SKIP.format(mark="other"),
    "unit/test_docker.py": SKIP.format(mark="docker"),
    "unit/test_plain.py": SKIP.format(mark="other"),
}
REAL_THINGS = {
    "integration/test_plain.py",
    "integration/test_module.py",
    "acceptance/test_plain.py",
    "unit/test_docker.py",
}


def failed_files(place: Path, ci: str) -> set[str]:
    for name, source in SUITE.items():
        (place / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "tests" / name).write_text(source)
    tests_dir = Path(__file__).parent.parent
    shutil.copy(tests_dir / "conftest.py", place / "tests" / "conftest.py")
    shutil.copy(tests_dir / "new_stores.py", place / "tests" / "new_stores.py")
    shutil.copytree(tests_dir / "guard", place / "tests" / "guard", dirs_exist_ok=True)
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n    docker\n    optional\n    release\n    other\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--import-mode=importlib", "--continue-on-collection-errors", "-rfE", "tests"],
        cwd=place,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    marks = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    assert done.returncode == (1 if marks else 0), done.stdout
    return {mark.partition("::")[0].removeprefix("tests/") for mark in marks}


@pytest.mark.parametrize(("ci", "failed"), [("true", REAL_THINGS), ("", {"acceptance/test_long.py"})])
def test_a_skip_of_the_real_thing_fails_in_ci_only_and_a_long_test_is_left_out_there(
    tmp_path: Path, ci: str, failed: set[str]
) -> None:
    assert failed_files(tmp_path, ci) == failed
