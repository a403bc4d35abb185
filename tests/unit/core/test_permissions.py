"""Files are for their owner alone; what other users could have written is refused."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.maintenance.place import NOW, fill, loose_entries
from traced.config.settings import load_settings
from traced.core.errors import ConfigError, DataDirectoryUnusable
from traced.core.location import data_directory
from traced.core.ownership import current_holder, exclusive_access
from traced.core.permissions import (
    Tightened,
    check_directory,
    check_settings_file,
    private_opener,
    private_umask,
    tighten,
)
from traced.maintenance.backup import back_up
from traced.maintenance.restore import restore
from traced.maintenance.upgrade import upgrade

ROOT = Path(__file__).parents[3]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


def test_every_entry_point_sets_the_umask_before_anything_else() -> None:
    modules = [path for path in (ROOT / "traced").rglob("*.py") if "__name__ ==" in path.read_text()]
    unset = {
        str(path.relative_to(ROOT))
        for path in modules
        if not re.search(
            r"private_umask\(\)|os\.umask\(0o077\)|run_child\(|import main$", path.read_text(), re.MULTILINE
        )
    }
    assert unset == {"traced/inference/vllm_build.py"}  # prints three values and writes no file


@pytest.mark.usefixtures("umask")
def test_files_are_private_under_any_umask(tmp_path: Path) -> None:
    with open(tmp_path / "explicit", "x", opener=private_opener):
        pass
    assert mode(tmp_path / "explicit") == 0o600
    private_umask()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    assert (mode(tmp_path / "folder"), mode(tmp_path / "folder" / "file")) == (0o700, 0o600)


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o1777])
def test_a_directory_that_others_can_write_is_refused_by_every_use(tmp_path: Path, bits: int) -> None:
    place = tmp_path / "data"
    place.mkdir()
    place.chmod(bits)
    message = f"the data directory {place} can be written by other users \\(mode {bits:04o}\\)"
    with pytest.raises(DataDirectoryUnusable, match=message) as refusal:
        load_settings(place)
    assert refusal.value.hint == f"chmod go-w {place}"
    for use in (data_directory, current_holder):
        with pytest.raises(DataDirectoryUnusable, match=message):
            use(place)
    with pytest.raises(DataDirectoryUnusable, match=message), exclusive_access(place, NOW):
        pass
    assert not list(place.iterdir())
    place.chmod(bits & ~0o022)
    assert load_settings(place).data_dir == place


def test_settings_that_others_can_write_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "data" / "traced.toml"
    file.parent.mkdir()
    file.write_text('notify.commands = [{name = "x", argv = ["/tmp/x"]}]\n')
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"traced\.toml can be written by other users") as refusal:
        load_settings(file.parent)
    assert refusal.value.hint == f"chmod go-w {file}, after a look at what it contains"
    # The same for a file in the working directory.
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=r"traced\.toml can be written by other users"):
        load_settings(tmp_path / "elsewhere")
    file.chmod(0o644)
    assert load_settings(file.parent).notify.commands[0].name == "x"


def test_what_another_user_owns_is_refused_unless_by_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    for user, accepted in ((owner, True), (0, True), (owner + 1, owner == 0)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        if accepted:
            check_directory(tmp_path)
        else:
            with pytest.raises(DataDirectoryUnusable, match="belongs to another user"):
                check_directory(tmp_path)
    check_settings_file(tmp_path / "does not exist")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_directory_of_a_third_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, 4242, 4242)
    monkeypatch.setattr(os, "geteuid", lambda: 4243)
    with pytest.raises(DataDirectoryUnusable, match=r"belongs to another user \(uid 4242\)"):
        check_directory(tmp_path)


def test_tightening_follows_no_link_and_keeps_the_owners_bits(tmp_path: Path) -> None:
    place, outside = tmp_path / "data", tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for name in ("linked", "hard", "folder/inner"):
        (outside / name).touch()
    (place / "sub").mkdir(parents=True)
    for name, bits in {"store": 0o666, "sub/adapter": 0o444, "sub/program": 0o755}.items():
        (place / name).touch()
        (place / name).chmod(bits)
    (place / "link").symlink_to(outside / "linked")
    (place / "to folder").symlink_to(outside / "folder")
    os.link(outside / "hard", place / "hard")
    os.mkfifo(place / "pipe")
    outside_modes = {path: mode(path) for path in outside.rglob("*")}
    assert tighten(place) == Tightened(files=3, folders=2)
    assert {name: mode(place / name) for name in (".", "sub", "store", "sub/adapter", "sub/program")} == {
        ".": 0o700,
        "sub": 0o700,
        "store": 0o600,
        "sub/adapter": 0o400,
        "sub/program": 0o700,
    }
    assert {path: mode(path) for path in outside.rglob("*")} == outside_modes
    assert not tighten(place)


def test_an_upgrade_tightens_and_a_restore_leaves_nothing_open(tmp_path: Path) -> None:
    settings = fill(tmp_path / "data")
    assert loose_entries(settings.data_dir)
    backup = back_up(settings, tmp_path / "kept.tar.zst", now=NOW)
    done = upgrade(settings, now=NOW)
    assert done.tightened.files > 5
    assert loose_entries(settings.data_dir) == []
    assert not upgrade(settings, now=NOW).tightened
    (tmp_path / "back").mkdir(0o755)
    (tmp_path / "back" / "old").touch(0o644)
    result = restore(backup.path, tmp_path / "back", load_settings, now=NOW, force=True)
    assert result.aside is not None
    assert loose_entries(result.aside) == []
    assert loose_entries(tmp_path / "back") == []
    assert mode(tmp_path / "back") == 0o700
