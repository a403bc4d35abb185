import errno
import json
import os
from pathlib import Path

import pytest

from traced.core.errors import DiskError
from traced.core.files import publish_file, publish_folder
from traced.training.metrics import append, read_metrics, truncate_after


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "adapter"
    publish_folder(target, lambda folder: (folder / "a").write_text("1"))
    publish_folder(target, lambda folder: (folder / "b").write_text("2"))
    assert leftovers(tmp_path) == ["adapter", "b"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 128 vs 22"),
        ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_leaves_nothing_half_written_and_the_old_version_in_place(tmp_path: Path, error: Exception) -> None:
    target = tmp_path / "adapter"
    publish_folder(target, lambda folder: (folder / "a").write_text("old"))

    def fill(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise error

    with pytest.raises(DiskError, match="no partial file") as error_info:
        publish_folder(target, fill)
    assert str(target) in str(error_info.value)
    assert leftovers(tmp_path) == ["a", "adapter"]
    assert (target / "a").read_text() == "old"


def test_any_other_error_passes_and_leaves_nothing_either(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise KeyError("other")

    with pytest.raises(KeyError):
        publish_folder(tmp_path / "adapter", fill)
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_device_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskError, match="No space left"):
        append(tmp_path / "metrics.jsonl", {"iteration": 1})


def test_a_file_appears_whole(tmp_path: Path) -> None:
    publish_file(tmp_path / "sub" / "f.json", "1")
    assert leftovers(tmp_path) == ["f.json", "sub"]


def test_metrics_after_the_checkpoint_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for iteration in range(1, 5):
        append(path, {"iteration": iteration})
    with path.open("a") as file:
        file.write('{"iterat')
    truncate_after(path, 2)
    assert read_metrics(path) == [{"iteration": 1}, {"iteration": 2}]
    assert [json.loads(line)["iteration"] for line in path.read_text().splitlines()] == [1, 2]
    truncate_after(tmp_path / "none.jsonl", 2)
    assert read_metrics(tmp_path / "none.jsonl") == []
