"""A rollback in an emergency: on a full disk, without the socket, and beside a service that hangs."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import text

from store import database
from store.database import open_store, read_session, sqlite_url, write_session
from store.errors import NotLive
from store.repositories.events import list_audit
from store.repositories.promotions import live_adapters, read_adapter_state
from store.repositories.requests import begin_request
from tests.acceptance.conftest import Traced
from tests.acceptance.test_acts_verbs import daemon
from tests.unit.registry.chain import seed_adapter, seed_cycle
from tests.waiting import eventually
from traced.cli.decisions import decide, rollback
from traced.config.settings import load_settings
from traced.core.errors import ServiceSilent
from traced.core.ownership import RESERVE, SERVICE, hold_directory
from traced.core.reserve import SIZE, create_reserve, reserve_folder
from traced.registry import decisions
from traced.registry.decision_rules import Action

ADAPTER = "error-recovery@v1"
DISK = 2 * SIZE + 8 * 2**20  # bytes


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory with a live adapter version; no cycle is due."""
    directory = tmp_path / "traced-data"
    directory.mkdir(mode=0o700)
    seed(directory)
    return directory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A data directory like ``data_dir`` on a small file system of its own."""
    directory = tmp_path / "traced-data"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    seed(directory)
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def seed(directory: Path) -> None:
    engine = open_store(sqlite_url(directory / "traced.db"))
    with write_session(engine) as session:
        seed_cycle(session)
        seed_adapter(session, directory, 1)
        decisions.approve(session, Action("ann", "local", datetime.now(UTC)), ADAPTER)
    engine.dispose()


def state(directory: Path) -> tuple[list[str], list[str]]:
    """Return the live adapters and the audited actions, oldest first."""
    engine = open_store(sqlite_url(directory / "traced.db"))
    with read_session(engine) as session:
        live = [promotion.adapter for promotion in live_adapters(session)]
        actions = [entry.action for entry in list_audit(session)][::-1]
    engine.dispose()
    return live, actions


def fill(directory: Path) -> None:
    with suppress(OSError), (directory / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 4096)


def check_full_disk(traced: Traced, disk: Path) -> None:
    eventually((disk / RESERVE).exists)
    fill(disk)
    assert shutil.disk_usage(disk).free == 0
    done = traced("rollback", "--yes")
    assert done.code == 0, done.err
    assert not (disk / RESERVE).exists()
    (disk / "fill").unlink()
    assert state(disk) == ([], ["approve", "rollback"])


def test_on_a_full_disk(traced: Traced, small_disk: Path) -> None:
    assert create_reserve(small_disk)
    check_full_disk(traced, small_disk)


@pytest.mark.slow
def test_on_a_full_disk_by_the_service(traced: Traced, small_disk: Path) -> None:
    with daemon(small_disk):
        check_full_disk(traced, small_disk)


@pytest.mark.slow
def test_without_the_socket_and_beside_a_service_that_hangs(traced: Traced, data_dir: Path) -> None:
    path = data_dir / "traced.sock"
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    with daemon(data_dir) as running:
        path.unlink()
        eventually(path.exists, within_s=10)
        eventually(lambda: traced("status", "--alive").code == 0, within_s=30)
        running.send_signal(signal.SIGSTOP)
        done = traced("rollback", "--yes")
        assert done.code == 0, done.err
        assert "does not answer; the store is changed without it" in " ".join(done.err.split())
        with write_session(engine) as session:
            tag = read_adapter_state(session, ADAPTER).tag
            decisions.approve(session, Action("bob", "local", datetime.now(UTC)), ADAPTER, tag=tag)
        path.unlink()
        assert traced("rollback", "--yes").code == 0
        with write_session(engine) as session:
            tag = read_adapter_state(session, ADAPTER).tag
            decisions.approve(session, Action("bob", "local", datetime.now(UTC)), ADAPTER, tag=tag)
        # The service now reads the request that it did not answer, and must not carry it out any more.
        running.send_signal(signal.SIGCONT)
        eventually(lambda: traced("status", "--alive").code == 0, within_s=30)
    engine.dispose()
    assert state(data_dir) == ([ADAPTER], ["approve", *["rollback", "approve"] * 2])
    assert any("was removed and is created again" in line for line in running.lines)


def test_a_service_that_hangs_with_the_lock_of_the_store_is_named(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    holder = hold_directory(data_dir, now=lambda: datetime.now(UTC), version="test", purpose=SERVICE)
    with holder, write_session(engine) as session:
        session.execute(text("SELECT 1"))  # takes the lock
        with pytest.raises(ServiceSilent) as raised:
            rollback(ADAPTER, yes=True, data_dir=data_dir)
    engine.dispose()
    assert f"end it with kill -KILL {os.getpid()}" in raised.value.hint
    assert state(data_dir) == ([ADAPTER], ["approve"])


def test_what_is_refused_beside_a_service_is_not_carried_out_later(data_dir: Path) -> None:
    engine = open_store(sqlite_url(data_dir / "traced.db"))
    with write_session(engine) as session:
        decisions.roll_back(session, Action("bob", "local", datetime.now(UTC)), ADAPTER)
        seed_adapter(session, data_dir, 2)
    with (
        hold_directory(data_dir, now=lambda: datetime.now(UTC), version="test", purpose=SERVICE),
        pytest.raises(NotLive),
    ):
        decide(
            load_settings(data_dir),
            lambda client: client.roll_back("error-recovery@v2"),
            lambda session, action: decisions.roll_back(session, action, "error-recovery@v2"),
            who="",
            reason="",
            key="k1",
        )
    with write_session(engine) as session:
        response = begin_request(session, "k1", None, at=datetime.now(UTC))
    engine.dispose()
    assert response is not None
    assert response["refusal"]["type"] == "NotLive"


def test_a_command_that_moves_the_store_is_left_alone(traced: Traced, data_dir: Path) -> None:
    with hold_directory(data_dir, now=lambda: datetime.now(UTC), version="test"):
        refusal = traced("rollback", "--yes")
    assert "does not answer; no decision was stored" in " ".join(refusal.err.split())
    assert state(data_dir) == ([ADAPTER], ["approve"])


def test_the_reserve_lies_beside_the_file_of_the_store(tmp_path: Path) -> None:
    assert reserve_folder(sqlite_url(tmp_path / "other" / "traced.db")) == tmp_path / "other"
    assert reserve_folder("postgresql://localhost/traced") is None


def test_the_reserve_leaves_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    assert create_reserve(tmp_path, 4096)
    assert (tmp_path / RESERVE).stat().st_blocks * 512 >= 4096
    (tmp_path / RESERVE).unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=8191))
    assert not create_reserve(tmp_path, 4096)
    assert not (tmp_path / RESERVE).exists()
