"""Backup and restore of a directory with SQLite; PostgreSQL's is in tests/integration/test_upkeep_postgres.py."""

import io
import json
import signal
import sqlite3
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
import zstandard

from store.database import open_store, read_session, write_session
from store.repositories.adapters import get_adapter
from store.repositories.evidence import evidence_chain
from store.repositories.trajectories import save_trajectories
from store.schema_version import HEAD
from tests.unit.maintenance.place import ADAPTER, NOW, WEIGHTS, fill, rows, settings_at, tree, write
from tests.unit.store.chain import HASH, trajectory
from traced.core.errors import AlreadyRunning
from traced.core.ownership import CYCLE_LOCK, SERVICE_LOCK, hold_directory
from traced.maintenance import archive
from traced.maintenance.archive import MANIFEST
from traced.maintenance.backup import back_up
from traced.maintenance.errors import BackupDamaged, BackupFailed, RestoreRefused
from traced.maintenance.restore import restore


@pytest.fixture
def place(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def backup_file(place: Path, tmp_path: Path) -> Path:
    return back_up(settings_at(place), tmp_path / "b" / "one.tar.zst", now=NOW).path


def test_a_backup_holds_what_cannot_be_made_again_and_nothing_else(place: Path, backup_file: Path) -> None:
    manifest = archive.verify(backup_file)
    assert sorted(manifest.members) == [
        f"adapters/{ADAPTER}/adapter_model.safetensors",
        f"adapters/{ADAPTER}/manifest.json",
        "checkpoints.db",
        f"environments/{HASH}.py",
        "runs/c1/report.html",
        "traced.db",
        "traced.toml",
    ]
    assert (manifest.database, manifest.schema, manifest.made_at) == ("sqlite", HEAD, NOW.isoformat())
    assert backup_file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in backup_file.parent.iterdir()] == ["one.tar.zst"]


def test_a_restored_directory_is_the_one_that_was_backed_up(place: Path, backup_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "data"
    done = restore(backup_file, target, settings_at, now=NOW)
    assert done.aside is None
    assert (target / "adapters" / ADAPTER / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (target / "adapters" / ADAPTER / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o400
    assert tree(target / "environments") == tree(place / "environments")
    assert rows(target / "checkpoints.db") == rows(place / "checkpoints.db")
    assert settings_at(target).seed == 5
    store = open_store(settings_at(target).store_url)
    with read_session(store) as session:
        assert evidence_chain(session, ADAPTER).missing == []
        assert get_adapter(session, ADAPTER).path == str(target / "adapters" / ADAPTER)
    store.dispose()
    assert [path.name for path in target.parent.iterdir()] == ["data"]


def test_in_place_nothing_is_lost_the_old_is_aside_and_backups_stay(place: Path) -> None:
    backup = back_up(settings_at(place), now=NOW).path
    assert backup.parent == place / "backups"
    old = rows(place / "traced.db")
    store = open_store(settings_at(place).store_url)
    with write_session(store) as session:
        save_trajectories(session, [trajectory("later")])
    store.dispose()
    newer = tree(place, lambda path: path.suffix == ".safetensors" or path.suffix == ".pt")
    done = restore(backup, place, settings_at, now=NOW, force=True)
    assert rows(place / "traced.db") == old
    assert backup.exists()
    assert done.aside is not None
    assert any("'later'" in line for line in rows(done.aside / "traced.db"))
    assert tree(done.aside, lambda path: path.suffix in (".safetensors", ".pt")) == newer
    second_restore = restore(backup, place, settings_at, now=NOW, force=True)
    assert second_restore.aside is not None
    assert second_restore.aside != done.aside


def test_a_directory_that_holds_data_is_left_alone_without_force(place: Path, backup_file: Path) -> None:
    contents = tree(place)
    with pytest.raises(RestoreRefused, match=r"already holds data \(adapters, checkpoints.db"):
        restore(backup_file, place, settings_at, now=NOW)
    locks = {SERVICE_LOCK, CYCLE_LOCK}
    assert {name: content for name, content in tree(place).items() if name not in locks} == contents


@pytest.mark.parametrize("file", [SERVICE_LOCK, CYCLE_LOCK], ids=["by a service", "by a verb"])
def test_a_directory_in_use_is_left_alone(place: Path, backup_file: Path, file: str) -> None:
    in_use = hold_directory(place, now=lambda: NOW, version="1", file_name=file)
    with in_use, pytest.raises(AlreadyRunning, match="in use by process"):
        restore(backup_file, place, settings_at, now=NOW, force=True)
    assert restore(backup_file, place, settings_at, now=NOW, force=True).aside is not None


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_a_cut_off_backup_is_told(backup_file: Path, at: float) -> None:
    data = backup_file.read_bytes()
    backup_file.write_bytes(data[: int(len(data) * at)])
    with pytest.raises(BackupDamaged, match=str(backup_file)):
        archive.verify(backup_file)


def test_a_flipped_bit_is_told_unless_it_changes_nothing(backup_file: Path) -> None:
    """Compressed blocks contain padding bits: flipping one leaves the content unchanged, which is not damage."""
    data, tar_data = backup_file.read_bytes(), unpack(backup_file)
    detections = 0
    for position in range(6, len(data), max(1, len(data) // 60)):  # after magic number, flags and window size
        backup_file.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        try:
            archive.verify(backup_file)
        except BackupDamaged:
            detections += 1
        else:
            assert unpack(backup_file) == tar_data, position
    assert detections > 50


def unpack(backup_file: Path) -> bytes:
    content: bytes = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(backup_file.read_bytes())).readall()
    return content


def repack(backup_file: Path, change: "Repack") -> None:
    """Rewrite the backup with changed members, pairs of (TarInfo, content)."""
    tar_data = unpack(backup_file)
    with tarfile.open(fileobj=io.BytesIO(tar_data)) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in change(members):
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    backup_file.write_bytes(zstandard.ZstdCompressor().compress(out.getvalue()))


Members = list[tuple[tarfile.TarInfo, bytes]]
Repack = Callable[[Members], Members]


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "odd",
    [
        member("../escaped"),
        member("/tmp/escaped-absolute"),
        member("runs/../../escaped"),
        member("runs/link", tarfile.SYMTYPE, "/etc/passwd"),
        member("runs/hard", tarfile.LNKTYPE, "traced.db"),
        member("runs/fifo", tarfile.FIFOTYPE),
        member("runs/device", tarfile.CHRTYPE),
    ],
    ids=lambda info: info.name,
)
def test_no_member_escapes_and_none_is_special(backup_file: Path, tmp_path: Path, odd: tarfile.TarInfo) -> None:
    repack(backup_file, lambda members: [(odd, b""), *members])
    contents = tree(tmp_path)
    for operation in (
        lambda: archive.verify(backup_file),
        lambda: restore(backup_file, tmp_path / "new", settings_at, now=NOW),
    ):
        with pytest.raises(BackupDamaged, match="is not a backup"):
            operation()
    assert {name for name in tree(tmp_path) if not name.endswith(".lock")} == set(contents)
    assert not Path("/tmp/escaped-absolute").exists()


def test_a_member_more_or_less_or_twice_is_told(backup_file: Path) -> None:
    data = backup_file.read_bytes()
    for change in (
        lambda members: [(member("runs/more"), b"x"), *members],
        lambda members: members[1:],
        lambda members: [members[0], *members],
        lambda members: [*members, (member("after"), b"x")],
        lambda members: members[:-1],
    ):
        backup_file.write_bytes(data)
        repack(backup_file, change)
        with pytest.raises(BackupDamaged):
            archive.verify(backup_file)


def with_manifest(backup_file: Path, **changes: object) -> None:
    def change(members: Members) -> Members:
        manifest, _ = members[-1]
        fields = asdict(archive.verify(backup_file)) | changes
        assert manifest.name == MANIFEST
        return [*members[:-1], (manifest, json.dumps(fields).encode())]

    repack(backup_file, change)


def test_a_newer_schema_is_refused_before_anything_changes(backup_file: Path, place: Path) -> None:
    with_manifest(backup_file, schema="9999")
    contents = tree(place)
    with pytest.raises(RestoreRefused, match=r"schema '9999'.*\(try: upgrade traced\)"):
        restore(backup_file, place, settings_at, now=NOW, force=True)
    locks = {SERVICE_LOCK, CYCLE_LOCK}
    assert {name: content for name, content in tree(place).items() if name not in locks} == contents
    assert sorted(path.name for path in place.parent.iterdir()) == ["b", "data"]


def test_another_format_and_another_kind_of_database_are_refused(backup_file: Path, tmp_path: Path) -> None:
    with_manifest(backup_file, database="postgresql")
    with pytest.raises(RestoreRefused, match="contains a postgresql store"):
        restore(backup_file, tmp_path / "new", settings_at, now=NOW)
    with_manifest(backup_file, format=2)
    with pytest.raises(BackupDamaged, match="has format 2"):
        archive.verify(backup_file)


def test_a_backup_is_whole_while_others_write(place: Path, tmp_path: Path) -> None:
    settings = settings_at(place)
    stop = threading.Event()
    pair_numbers: list[int] = []

    def write_pairs() -> None:
        store = open_store(settings.store_url)
        while not stop.is_set():
            number = len(pair_numbers)
            with write_session(store) as session:  # one transaction: an inconsistent copy contains one of the rows
                save_trajectories(session, [trajectory(f"a{number}"), trajectory(f"b{number}")])
            pair_numbers.append(number)
        store.dispose()

    writer = threading.Thread(target=write_pairs)
    writer.start()
    try:
        for number in range(3):
            back_up(settings, tmp_path / f"{number}.tar.zst", now=NOW)
    finally:
        stop.set()
        writer.join()
    for number in range(3):
        restore(tmp_path / f"{number}.tar.zst", tmp_path / f"r{number}", settings_at, now=NOW)
        with closing(sqlite3.connect(tmp_path / f"r{number}" / "traced.db")) as connection:
            [(pairs, singles)] = connection.execute(
                "SELECT sum(id LIKE 'a%'), sum(id LIKE 'b%') FROM trajectories"
            ).fetchall()
            assert pairs == singles
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    assert pair_numbers


def test_what_a_backup_needs_and_lacks_is_named(tmp_path: Path, backup_file: Path, place: Path) -> None:
    with pytest.raises(BackupFailed, match="there is no store at"):
        back_up(settings_at(tmp_path / "nothing"), tmp_path / "x.tar.zst", now=NOW)
    with pytest.raises(BackupFailed, match="exists already"):
        back_up(settings_at(place), backup_file, now=NOW)
    write(tmp_path / "file", b"")
    with pytest.raises(BackupFailed, match="cannot write in"):
        back_up(settings_at(place), tmp_path / "file" / "x.tar.zst", now=NOW)
    with pytest.raises(BackupDamaged, match="cannot be opened"):
        archive.verify(tmp_path / "none")
    write(tmp_path / "odd", b"this is no backup at all")
    with pytest.raises(BackupDamaged, match="cannot be read as a backup"):
        archive.verify(tmp_path / "odd")
    assert not (tmp_path / "nothing").exists()


def test_backups_of_one_second_do_not_stand_in_each_others_way(place: Path) -> None:
    names = [back_up(settings_at(place), now=NOW).path.name for _ in range(3)]
    stamp = f"traced-{NOW:%Y%m%dT%H%M%SZ}"
    assert names == [f"{stamp}.tar.zst", f"{stamp}-2.tar.zst", f"{stamp}-3.tar.zst"]


def test_a_damaged_database_is_no_backup(place: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(place / "traced.db")) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'toolsets'").fetchall()
        [(size,)] = connection.execute("PRAGMA page_size").fetchall()
    with (place / "traced.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with pytest.raises(BackupFailed, match="is damaged"):
        back_up(settings_at(place), tmp_path / "x" / "one.tar.zst", now=NOW)
    assert list((tmp_path / "x").iterdir()) == []


def test_settings_that_keep_the_store_elsewhere_are_told(backup_file: Path, tmp_path: Path) -> None:
    def settings_with_foreign_store(data_dir: Path) -> object:
        settings = settings_at(data_dir)
        return settings.model_copy(update={"store": settings.store.model_copy(update={"url": "sqlite:////else/x.db"})})

    with pytest.raises(RestoreRefused, match=r"name the store /else/x\.db"):
        restore(backup_file, tmp_path / "new", settings_with_foreign_store, now=NOW)  # type: ignore[arg-type]


KILLED = """
import os, signal, sys
from datetime import datetime, UTC
from pathlib import Path
from tests.unit.maintenance.place import NOW, settings_at
from traced.maintenance.restore import restore
counted = 0
def die(frame, event, argument):
    global counted
    if event == "call" and "/maintenance/" in frame.f_code.co_filename:
        counted += 1
        if counted == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
sys.setprofile(die)
restore(Path(sys.argv[1]), Path(sys.argv[2]), settings_at, now=NOW, force=True)
sys.setprofile(None)
print("done", counted)
"""


@pytest.mark.slow
def test_a_restore_that_is_killed_leaves_the_old_or_the_new_directory_whole(place: Path, backup_file: Path) -> None:
    """Kill the restore at different calls of the project's functions, then let it finish."""
    old_rows, point, ends = rows(place / "traced.db"), 1, set()
    store = open_store(settings_at(place).store_url)
    with write_session(store) as session:
        save_trajectories(session, [trajectory("later")])
    store.dispose()
    new_rows = rows(place / "traced.db")
    while True:
        process = subprocess.run(
            [sys.executable, "-c", KILLED, str(backup_file), str(place), str(point)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        current_rows = rows(place / "traced.db")
        assert current_rows in (old_rows, new_rows), point
        assert (place / "adapters" / ADAPTER / "adapter_model.safetensors").read_bytes() == WEIGHTS
        ends.add(current_rows == old_rows)
        if process.returncode != -signal.SIGKILL or current_rows == old_rows:
            break
        point += 12
    assert point > 1
    assert ends == {True, False}
