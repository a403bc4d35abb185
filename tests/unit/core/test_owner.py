"""The owner label of the containers of a data directory: stable and unique."""

import multiprocessing
from pathlib import Path

import pytest

from traced.core.errors import DataDirectoryUnusable
from traced.core.ownership import OWNER_FILE, sandbox_owner


def test_a_directory_keeps_its_name_and_no_other_has_it(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first = sandbox_owner(tmp_path / "a")
    assert first == sandbox_owner(tmp_path / "a")
    assert first != sandbox_owner(tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [OWNER_FILE]


def test_an_empty_owner_file_is_recreated(tmp_path: Path) -> None:
    (tmp_path / OWNER_FILE).touch()
    assert sandbox_owner(tmp_path) == sandbox_owner(tmp_path) != ""


def test_concurrent_first_calls_get_the_same_name(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(sandbox_owner, [tmp_path] * 64, chunksize=1))) == 1


def test_a_missing_directory_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataDirectoryUnusable, match="cannot be created or read: No such file"):
        sandbox_owner(tmp_path / "gone")
