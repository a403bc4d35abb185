"""The memory limit: the smallest of the machine and all cgroups above the process."""

from pathlib import Path

import psutil
import pytest

from traced.core import resources


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/a/b\n")
    (tmp_path / "fs/a/b").mkdir(parents=True)
    monkeypatch.setattr(resources, "OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(resources, "CGROUPS", tmp_path / "fs")
    return tmp_path / "fs"


@pytest.mark.parametrize(
    ("parent_limit", "own_limit", "expected"),
    [("max", "max", None), ("4096", "max", 4096), ("4096", "1024", 1024), ("", "9", 9)],
)
def test_the_smallest_cgroup_limit_counts(
    groups: Path, parent_limit: str, own_limit: str, expected: int | None
) -> None:
    (groups / "a/memory.max").write_text(parent_limit + "\n")
    (groups / "a/b/memory.max").write_text(own_limit + "\n")
    assert resources.memory_bytes() == (psutil.virtual_memory().total if expected is None else expected)


def test_without_cgroups_the_machine_limits(groups: Path) -> None:
    resources.OWN_CGROUP.unlink()
    assert resources.memory_bytes() == psutil.virtual_memory().total
