"""Real processes race for leases on one database: exactly one wins, on SQLite and on PostgreSQL."""

import json
import os
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.chaos.postgres import missing
from store.database import open_store, sqlite_url, write_session
from store.repositories.leases import acquire, list_leases

RACERS = 4
POSTGRES = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=POSTGRES)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty, migrated store."""
    url = sqlite_url(tmp_path / "traced.db") if request.param == "sqlite" else request.getfixturevalue("url")
    open_store(url).dispose()
    return url


def race(database: str, folder: Path, task: str, count: int) -> list[list[str]]:
    """What each of the racers got; they begin together."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.lease_racer", database, f"racer{number}", task, str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RACE_FOLDER": str(folder)},
        )
        for number in range(RACERS)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    results = [racer.communicate(timeout=250)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * RACERS
    return [json.loads(result) for result in results]


def lapse(database: str, count: int) -> None:
    """Leave the lapsed lease of a dead holder on every device."""
    engine = open_store(database)
    with write_session(engine) as session:
        for number in range(count):
            long_ago = datetime.now(UTC) - timedelta(hours=1)
            acquire(session, f"d{number}", "dead", "race", None, at=long_ago, ttl=timedelta(seconds=1))
    engine.dispose()


@pytest.mark.parametrize("of_the_dead", [False, True], ids=["free", "lapsed"])
def test_exactly_one_process_wins_each_device(database: str, tmp_path: Path, of_the_dead: bool) -> None:
    if of_the_dead:
        lapse(database, 60)
    acquired = race(database, tmp_path, "each", 60)
    assert Counter(device for devices in acquired for device in devices) == {f"d{number}": 1 for number in range(60)}
    engine = open_store(database)
    with write_session(engine) as session:
        holders = {lease.device: lease.holder for lease in list_leases(session)}
    engine.dispose()
    assert holders == {device: f"racer{number}" for number, devices in enumerate(acquired) for device in devices}


def test_a_device_never_has_two_holders(database: str, tmp_path: Path) -> None:
    assert race(database, tmp_path, "turns", 25) == [["one"] * 25] * RACERS


def test_two_of_three_gpus_are_leased_at_once_in_any_order(database: str, tmp_path: Path) -> None:
    assert race(database, tmp_path, "pairs", 20) == [["2"] * 20] * RACERS
    engine = open_store(database)
    with write_session(engine) as session:
        assert list_leases(session) == []
    engine.dispose()
