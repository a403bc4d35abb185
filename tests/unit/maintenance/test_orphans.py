"""Staging files and leases of killed processes; containers are in tests/integration/test_upkeep_docker.py."""

import fcntl
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlmodel import select

from store.database import open_store, read_session, write_session
from store.service_tables import LeaseRow
from tests.unit.maintenance.place import NOW, fill, tree, write
from tests.unit.store.chain import later
from traced.maintenance.backup import marked_alive
from traced.maintenance.orphans import Orphan, sweep

OWNER = "nobody in these tests"
FUTURE = datetime(2100, 1, 1, tzinfo=UTC)


def alive(holder: str) -> bool | None:
    return {"living": True, "dead": False}.get(holder)


def sweep_orphans(data_dir: Path, now: datetime = FUTURE, min_age: timedelta = timedelta(0)) -> list[Orphan]:
    store = open_store(f"sqlite:///{data_dir / 'traced.db'}")
    orphans = sweep(data_dir, store, alive, now=now, min_age=min_age, owner=OWNER)
    store.dispose()
    return [orphan for orphan in orphans if orphan.kind != "container"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    fill(tmp_path / "data")
    sweep_orphans(tmp_path / "data")
    return tmp_path / "data"


def leftovers(place: Path) -> list[Path]:
    return [
        write(place / "runs" / "c1" / "training" / "x" / "checkpoints" / ".checkpoint-5.partial" / "a" / "b", b"x"),
        write(place / "runs" / "c1" / ".report.html.partial", b"x"),
        write(place / "environments" / "abc.partial", b"x"),
        write(place / "backups" / ".partial-backup-xyz" / "archive", b"x"),
        write(place.parent / ".data.restoring-xyz" / "traced.db", b"x"),
    ]


def test_staging_of_the_dead_goes_and_all_else_stays(place: Path) -> None:
    contents = tree(place.parent)
    left = leftovers(place)
    assert len(sweep_orphans(place)) == len(left)
    assert tree(place.parent) == contents
    assert sweep_orphans(place) == []


def test_a_publication_that_was_killed_goes_one_at_work_stays(place: Path) -> None:
    left = write(place / "adapters" / ".staging-x@v2" / "adapter_model.safetensors", b"half")
    lock = write(place / "adapters" / ".lock", b"")
    with lock.open("r+") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        assert sweep_orphans(place) == []
        assert left.exists()
    assert [orphan.name for orphan in sweep_orphans(place)] == [str(left.parent)]
    assert not left.parent.exists()


def test_backups_and_restores_at_work_stay(place: Path) -> None:
    backup, restore = [path.parent for path in leftovers(place)[-2:]]
    with marked_alive(backup), marked_alive(restore):
        sweep_orphans(place)
        assert backup.exists()
        assert restore.exists()
    assert {orphan.name for orphan in sweep_orphans(place)} == {str(backup), str(restore)}


def test_fresh_staging_stays_for_as_long_as_the_caller_says(place: Path) -> None:
    path = leftovers(place)[0]
    os.utime(path.parents[1], (0, 0))  # the newest file inside counts, not the folder
    seconds = path.stat().st_mtime
    now = datetime.fromtimestamp(seconds + 59, UTC)
    sweep_orphans(place, now, timedelta(seconds=60))
    assert path.exists()
    sweep_orphans(place, now + timedelta(seconds=2), timedelta(seconds=60))
    assert not path.exists()


def lease(device: str, holder: str, seconds: float) -> LeaseRow:
    expires = NOW + timedelta(seconds=seconds)
    return LeaseRow(
        device=device,
        holder=holder,
        purpose="train",
        acquired_at=later(1),
        heartbeat_at=later(2),
        expires_at=expires,
        wanted_by="",
    )


def test_leases_of_dead_holders_are_dropped_and_reported(place: Path) -> None:
    store = open_store(f"sqlite:///{place / 'traced.db'}")
    with write_session(store) as session:
        session.add_all(
            [
                lease("cpu", "dead", 60),
                lease("gpu0", "living", -60),
                lease("gpu1", "elsewhere", -60),
                lease("gpu2", "elsewhere", 60),
            ]
        )
    orphans = sorted((orphan.kind, orphan.name) for orphan in sweep_orphans(place, NOW))
    assert orphans == [
        ("lease", "cpu of dead"),
        ("lease", "gpu1 of elsewhere"),
    ]
    with read_session(store) as session:
        assert sorted(row.device for row in session.exec(select(LeaseRow))) == ["gpu0", "gpu2"]
    store.dispose()
    assert sweep_orphans(place, NOW) == []
