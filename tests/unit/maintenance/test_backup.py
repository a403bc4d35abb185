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
def made(place: Path, tmp_path: Path) -> Path:
    return back_up(settings_at(place), tmp_path / "b" / "one.tar.zst", now=NOW).path


def test_a_backup_holds_what_cannot_be_made_again_and_nothing_else(place: Path, made: Path) -> None:
    manifest = archive.verify(made)
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
    assert made.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in made.parent.iterdir()] == ["one.tar.zst"]


def test_a_restored_directory_is_the_one_that_was_backed_up(place: Path, made: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "data"
    done = restore(made, there, settings_at, now=NOW)
    assert done.aside is None
    assert (there / "adapters" / ADAPTER / "adapter_model.safetensors").read_bytes() == WEIGHTS
    assert (there / "adapters" / ADAPTER / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o444
    assert tree(there / "environments") == tree(place / "environments")
    assert rows(there / "checkpoints.db") == rows(place / "checkpoints.db")
    assert settings_at(there).seed == 5
    store = open_store(settings_at(there).store_url)
    with read_session(store) as opened:
        assert evidence_chain(opened, ADAPTER).missing == []
        assert get_adapter(opened, ADAPTER).path == str(there / "adapters" / ADAPTER)
    store.dispose()
    assert [path.name for path in there.parent.iterdir()] == ["data"]


def test_in_place_nothing_is_lost_the_old_is_aside_and_backups_stay(place: Path) -> None:
    before = back_up(settings_at(place), now=NOW).path
    assert before.parent == place / "backups"
    old = rows(place / "traced.db")
    store = open_store(settings_at(place).store_url)
    with write_session(store) as opened:
        save_trajectories(opened, [trajectory("later")])
    store.dispose()
    newer = tree(place, lambda path: path.suffix == ".safetensors" or path.suffix == ".pt")
    done = restore(before, place, settings_at, now=NOW, force=True)
    assert rows(place / "traced.db") == old
    assert before.exists()
    assert done.aside is not None
    assert any("'later'" in line for line in rows(done.aside / "traced.db"))
    assert tree(done.aside, lambda path: path.suffix in (".safetensors", ".pt")) == newer
    again = restore(before, place, settings_at, now=NOW, force=True)
    assert again.aside is not None
    assert again.aside != done.aside


def test_a_directory_that_holds_data_is_left_alone_without_force(place: Path, made: Path) -> None:
    before = tree(place)
    with pytest.raises(RestoreRefused, match=r"already holds data \(adapters, checkpoints.db"):
        restore(made, place, settings_at, now=NOW)
    locks = {SERVICE_LOCK, CYCLE_LOCK}
    assert {name: content for name, content in tree(place).items() if name not in locks} == before


@pytest.mark.parametrize("file", [SERVICE_LOCK, CYCLE_LOCK], ids=["by a service", "by a verb"])
def test_a_directory_in_use_is_left_alone(place: Path, made: Path, file: str) -> None:
    in_use = hold_directory(place, now=lambda: NOW, version="1", file_name=file)
    with in_use, pytest.raises(AlreadyRunning, match="in use by process"):
        restore(made, place, settings_at, now=NOW, force=True)
    assert restore(made, place, settings_at, now=NOW, force=True).aside is not None


@pytest.mark.parametrize("at", [0.02, 0.5, 0.98])
def test_a_cut_off_backup_is_told(made: Path, at: float) -> None:
    whole = made.read_bytes()
    made.write_bytes(whole[: int(len(whole) * at)])
    with pytest.raises(BackupDamaged, match=str(made)):
        archive.verify(made)


def test_a_flipped_bit_is_told_unless_it_changes_nothing(made: Path) -> None:
    """Compressed blocks have bits of padding: a flip there gives the same content, and is no damage."""
    whole, plain = made.read_bytes(), unpacked(made)
    told = 0
    for position in range(6, len(whole), max(1, len(whole) // 60)):  # behind magic number, flags and window size
        made.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            archive.verify(made)
        except BackupDamaged:
            told += 1
        else:
            assert unpacked(made) == plain, position
    assert told > 50


def unpacked(made: Path) -> bytes:
    content: bytes = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(made.read_bytes())).readall()
    return content


def repacked(made: Path, change: "Repack") -> None:
    """Write the backup again with other members; each is (TarInfo, content)."""
    plain = unpacked(made)
    with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, content in change(members):
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    made.write_bytes(zstandard.ZstdCompressor().compress(out.getvalue()))


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
def test_no_member_escapes_and_none_is_special(made: Path, tmp_path: Path, odd: tarfile.TarInfo) -> None:
    repacked(made, lambda members: [(odd, b""), *members])
    before = tree(tmp_path)
    for act in (lambda: archive.verify(made), lambda: restore(made, tmp_path / "new", settings_at, now=NOW)):
        with pytest.raises(BackupDamaged, match="is not a backup"):
            act()
    assert {name for name in tree(tmp_path) if not name.endswith(".lock")} == set(before)
    assert not Path("/tmp/escaped-absolute").exists()


def test_a_member_more_or_less_or_twice_is_told(made: Path) -> None:
    whole = made.read_bytes()
    for change in (
        lambda members: [(member("runs/more"), b"x"), *members],
        lambda members: members[1:],
        lambda members: [members[0], *members],
        lambda members: [*members, (member("after"), b"x")],
        lambda members: members[:-1],
    ):
        made.write_bytes(whole)
        repacked(made, change)
        with pytest.raises(BackupDamaged):
            archive.verify(made)


def with_manifest(made: Path, **changes: object) -> None:
    def change(members: Members) -> Members:
        manifest, _ = members[-1]
        told = asdict(archive.verify(made)) | changes
        assert manifest.name == MANIFEST
        return [*members[:-1], (manifest, json.dumps(told).encode())]

    repacked(made, change)


def test_a_newer_schema_is_refused_before_anything_changes(made: Path, place: Path) -> None:
    with_manifest(made, schema="9999")
    before = tree(place)
    with pytest.raises(RestoreRefused, match=r"schema '9999'.*\(try: upgrade traced\)"):
        restore(made, place, settings_at, now=NOW, force=True)
    locks = {SERVICE_LOCK, CYCLE_LOCK}
    assert {name: content for name, content in tree(place).items() if name not in locks} == before
    assert sorted(path.name for path in place.parent.iterdir()) == ["b", "data"]


def test_another_format_and_another_kind_of_database_are_refused(made: Path, tmp_path: Path) -> None:
    with_manifest(made, database="postgresql")
    with pytest.raises(RestoreRefused, match="contains a postgresql store"):
        restore(made, tmp_path / "new", settings_at, now=NOW)
    with_manifest(made, format=2)
    with pytest.raises(BackupDamaged, match="has format 2"):
        archive.verify(made)


def test_a_backup_is_whole_while_others_write(place: Path, tmp_path: Path) -> None:
    settings = settings_at(place)
    stop = threading.Event()
    written: list[int] = []

    def write_pairs() -> None:
        store = open_store(settings.store_url)
        while not stop.is_set():
            number = len(written)
            with write_session(store) as opened:  # two rows in one transaction: a torn copy would hold one
                save_trajectories(opened, [trajectory(f"a{number}"), trajectory(f"b{number}")])
            written.append(number)
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
        with closing(sqlite3.connect(tmp_path / f"r{number}" / "traced.db")) as opened:
            [(pairs, singles)] = opened.execute(
                "SELECT sum(id LIKE 'a%'), sum(id LIKE 'b%') FROM trajectories"
            ).fetchall()
            assert pairs == singles
            assert opened.execute("PRAGMA foreign_key_check").fetchall() == []
    assert written


def test_what_a_backup_needs_and_lacks_is_named(tmp_path: Path, made: Path, place: Path) -> None:
    with pytest.raises(BackupFailed, match="there is no store at"):
        back_up(settings_at(tmp_path / "nothing"), tmp_path / "x.tar.zst", now=NOW)
    with pytest.raises(BackupFailed, match="exists already"):
        back_up(settings_at(place), made, now=NOW)
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
    with closing(sqlite3.connect(place / "traced.db")) as opened:
        [(page,)] = opened.execute("SELECT rootpage FROM sqlite_master WHERE name = 'toolsets'").fetchall()
        [(size,)] = opened.execute("PRAGMA page_size").fetchall()
    with (place / "traced.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with pytest.raises(BackupFailed, match="is damaged"):
        back_up(settings_at(place), tmp_path / "x" / "one.tar.zst", now=NOW)
    assert list((tmp_path / "x").iterdir()) == []


def test_settings_that_keep_the_store_elsewhere_are_told(made: Path, tmp_path: Path) -> None:
    def elsewhere(data_dir: Path) -> object:
        settings = settings_at(data_dir)
        return settings.model_copy(update={"store": settings.store.model_copy(update={"url": "sqlite:////else/x.db"})})

    with pytest.raises(RestoreRefused, match=r"name the store /else/x\.db"):
        restore(made, tmp_path / "new", elsewhere, now=NOW)  # type: ignore[arg-type]


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
def test_a_restore_that_is_killed_leaves_the_old_or_the_new_directory_whole(place: Path, made: Path) -> None:
    """Killed at every fifth call of our own functions, then once more to the end."""
    was, point, ends = rows(place / "traced.db"), 1, set()
    store = open_store(settings_at(place).store_url)
    with write_session(store) as opened:
        save_trajectories(opened, [trajectory("later")])
    store.dispose()
    now = rows(place / "traced.db")
    while True:
        ran = subprocess.run(
            [sys.executable, "-c", KILLED, str(made), str(place), str(point)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        found = rows(place / "traced.db")
        assert found in (was, now), point
        assert (place / "adapters" / ADAPTER / "adapter_model.safetensors").read_bytes() == WEIGHTS
        ends.add(found == was)
        if ran.returncode != -signal.SIGKILL or found == was:
            break
        point += 12
    assert point > 1
    assert ends == {True, False}
