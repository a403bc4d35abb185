"""``traced up`` where it cannot: it says why and what to do, exits 1, and leaves everything as it was."""

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.chaos.place import Place
from store.schema_version import HEAD
from tests.acceptance.chaos.conftest import VARIABLES

GOLDEN = sorted((Path(__file__).parents[2] / "unit" / "store" / "golden").glob("v*.sql"))
Places = Callable[..., Place]


def up(place: Place, *words: str) -> str:
    """The error output of a service that cannot start."""
    done = subprocess.run(
        [sys.executable, "-m", "traced", "up", *words],
        env={**os.environ, **VARIABLES, **place.marks},
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "Try:" in done.stderr or "run " in done.stderr
    return done.stderr


def upgraded(place: Place) -> subprocess.CompletedProcess[str]:
    """Run `traced db upgrade`."""
    return subprocess.run(
        [sys.executable, "-m", "traced", "db", "upgrade"],
        env={**os.environ, **VARIABLES, **place.marks},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_second_daemon_is_refused_and_the_first_goes_on(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    place.start()
    output = up(place)
    assert f"in use by process {place.pid}" in output
    assert place.status().pid == place.pid
    assert place.stop() == 0


def test_killed_it_leaves_no_obstacle(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    for _ in range(2):
        place.start()
        place.kill()
    place.start()
    assert place.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
@pytest.mark.optional
def test_a_socket_of_somebody_else_is_left_alone(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    path = place.data_dir / "traced.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    os.chown(path, 65534, 65534)
    assert "belongs to user id 65534" in up(place)
    assert path.lstat().st_uid == 65534


def test_a_file_in_the_place_of_the_socket_is_left_alone(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    (place.data_dir / "traced.sock").write_text("precious")
    assert "exists and is not a socket" in up(place)
    assert (place.data_dir / "traced.sock").read_text() == "precious"


def test_a_port_that_is_taken(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = ["--set", f"api.port={listener.getsockname()[1]}"]
        assert "cannot listen on 127.0.0.1" in up(place, *port)
    place.start()  # what was refused is no obstacle
    assert place.stop() == 0


def test_a_data_directory_that_is_a_file(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    (place.data_dir / "traced.toml").unlink()
    place.data_dir.rmdir()
    place.data_dir.write_text("a file")
    assert "cannot be used" in up(place)


def test_a_database_that_is_none(folder: Path, places: Places) -> None:
    place = places(folder, settings="")
    (place.data_dir / "traced.db").write_text("no database at all, only text")
    assert "not a database" in up(place)
    assert (place.data_dir / "traced.db").read_text().startswith("no database")


def test_an_older_store_is_not_touched_and_an_upgrade_that_fails_half_way_changes_nothing(
    folder: Path, places: Places
) -> None:
    place = places(folder, settings="")
    path = place.data_dir / "traced.db"
    with closing(sqlite3.connect(path)) as old:
        old.executescript(GOLDEN[0].read_text())
        old.execute("CREATE TABLE leases (obstacle TEXT)")  # the next migration makes this table
        old.commit()
    rows_before = dump(path)
    assert "traced db upgrade" in up(place)
    done = upgraded(place)
    assert done.returncode == 1, done.stderr
    assert dump(path) == rows_before
    with closing(sqlite3.connect(path)) as repaired:
        repaired.execute("DROP TABLE leases")
        repaired.commit()
    done = upgraded(place)
    assert done.returncode == 0, done.stderr
    place.start()
    assert place.stop() == 0
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchall() == [(HEAD,)]


def dump(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())
