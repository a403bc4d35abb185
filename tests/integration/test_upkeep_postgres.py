"""Backup, restore, upgrade and retention of a store on a real PostgreSQL."""

import hashlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, text, update

from benchmarks.chaos.postgres import Server, missing
from store.database import connect, known_revisions, migrate, open_store, read_session, revision, write_session
from store.errors import StoreUnavailable, StoreVersionError
from store.records import CycleState, RouterKey
from store.repositories.adapters import get_adapter
from store.repositories.cycles import set_cycle_state
from store.repositories.evidence import evidence_chain
from store.repositories.promotions import list_promotions, roll_back
from store.repositories.serving import save_key
from store.repositories.trajectories import list_trajectories, save_trajectories
from store.schema_version import HEAD
from store.status import store_status
from store.tables import AdapterRow
from tests.unit.maintenance.place import ADAPTER, NOW, repacked
from tests.unit.store.chain import T0, adapter, later, save_chain, trajectory
from tests.unit.store.test_migrations import broken_migrations
from traced.config.settings import Settings, load_settings
from traced.maintenance.archive import verify
from traced.maintenance.backup import back_up
from traced.maintenance.errors import RestoreRefused
from traced.maintenance.prune import prune
from traced.maintenance.restore import restore
from traced.maintenance.upgrade import schema_state, upgrade

pytestmark = [pytest.mark.optional, pytest.mark.skipif(bool(missing()), reason=missing())]


def settings_for(url: str) -> "SettingsAt":
    def settings_at(data_dir: Path) -> Settings:
        return load_settings(data_dir, {"store.url": url})

    return settings_at


SettingsAt = Callable[[Path], Settings]


@pytest.fixture
def place(tmp_path: Path, url: str) -> Path:
    store = open_store(url)
    with write_session(store) as session:
        save_chain(session)
        adapter_path = tmp_path / "it's data" / "adapters" / ADAPTER
        files = {"adapter_model.safetensors": hashlib.sha256(b"weights").hexdigest()}
        session.execute(update(AdapterRow).values(path=str(adapter_path), files=files))
        session.execute(text("CREATE TABLE of_another_application (n INTEGER)"))
    store.dispose()
    adapter_path.mkdir(parents=True)
    (adapter_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path / "it's data"


def ids(url: str) -> list[str]:
    store = open_store(url)
    with read_session(store) as session:
        trajectory_ids = sorted(trajectory.id for trajectory in list_trajectories(session))
    store.dispose()
    return trajectory_ids


def add(url: str, *keys: str) -> None:
    store = open_store(url)
    with write_session(store) as session:
        save_trajectories(session, [trajectory(key) for key in keys])
    store.dispose()


def test_there_and_back_with_the_old_tables_aside(place: Path, url: str, tmp_path: Path) -> None:
    settings_at = settings_for(url)
    backup = back_up(settings_at(place), now=NOW)
    assert (backup.manifest.database, backup.manifest.namespace) == ("postgresql", "public")
    assert sorted(backup.manifest.members) == [f"adapters/{ADAPTER}/adapter_model.safetensors", "store.dump"]
    add(url, "later")
    new_directory = tmp_path / "else'where"
    with pytest.raises(RestoreRefused, match="already holds tables of traced"):
        restore(backup.path, new_directory, settings_at, now=NOW)
    assert ids(url) == ["later", "t1", "t2", "t3"]
    restored = restore(backup.path, new_directory, settings_at, now=NOW, force=True)
    assert restored.decisions == []
    assert restored.aside_schema == "before_20260320t120000z"
    assert ids(url) == ["t1", "t2", "t3"]
    store = open_store(url)
    with read_session(store) as session:
        assert evidence_chain(session, ADAPTER).missing == []
        assert get_adapter(session, ADAPTER).path == str(new_directory / "adapters" / ADAPTER)
        old_row_count = session.execute(text(f"SELECT count(*) FROM {restored.aside_schema}.trajectories")).scalar()
        assert old_row_count == 4
        assert session.execute(text("SELECT count(*) FROM of_another_application")).scalar() == 0
    with write_session(store) as session:  # the sequences came along
        set_cycle_state(session, "c1", CycleState.FAILED, at=later(9))
        session.execute(update(AdapterRow).values(files=adapter().files))
        save_chain(session)
    store.dispose()
    assert sorted(path.name for path in new_directory.iterdir()) == ["adapters"]


def test_into_an_empty_database(place: Path, url: str, postgres: Server, tmp_path: Path) -> None:
    store = open_store(url)
    with write_session(store) as session:
        save_key(session, RouterKey(id="agent", hash="0" * 64, per_minute=0, created_at=NOW))
    store.dispose()
    backup = back_up(settings_for(url)(place), now=NOW)
    admin = connect(postgres.url("postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE fresh"))
    fresh = postgres.url("fresh")
    restored = restore(backup.path, tmp_path / "new", settings_for(fresh), now=NOW)
    assert restored.decisions == []  # there was no store whose decisions could change
    assert restored.aside_schema is None
    assert ids(fresh) == ["t1", "t2", "t3"]
    with admin.connect() as connection:
        connection.execute(text("DROP DATABASE fresh WITH (FORCE)"))
    admin.dispose()


def test_a_load_that_fails_leaves_database_and_directory_as_they_were(place: Path, url: str, tmp_path: Path) -> None:
    store = connect(url)
    backup = back_up(settings_for(url)(place), now=NOW)
    with store.connect() as connection:
        connection.execute(text("CREATE VIEW in_the_way AS SELECT 1 AS n"))
        connection.execute(text("CREATE SCHEMA before_20260320t120000z"))  # so that the very first step fails
        connection.commit()
    with pytest.raises(RestoreRefused, match=r"the restore failed and the database is unchanged: schema .* exists"):
        restore(backup.path, place, settings_for(url), now=NOW, force=True)
    assert ids(url) == ["t1", "t2", "t3"]
    with store.connect() as connection:
        connection.execute(text("DROP SCHEMA before_20260320t120000z"))
        connection.execute(text("DROP TABLE responses"))
        connection.execute(text("CREATE VIEW responses AS SELECT 1 AS n"))  # so that the load fails half-way
        connection.commit()
    tables_before = tables(store)
    refusal = 'the restore failed and the database is unchanged: pg_restore ended with code 1: .*"responses" already'
    with pytest.raises(RestoreRefused, match=f"(?s){refusal}"):
        restore(backup.path, place, settings_for(url), now=NOW, force=True)
    assert tables(store) == tables_before
    with store.connect() as connection:
        schemas = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'before%'"
        assert connection.execute(text(schemas)).all() == []
        assert connection.execute(text("SELECT count(*) FROM trajectories")).scalar() == 3
    assert (place / "adapters" / ADAPTER / "adapter_model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == [place.name]
    store.dispose()


@pytest.mark.parametrize("name", ["store.sql", "store.dump"])
def test_a_backup_runs_no_command(place: Path, url: str, tmp_path: Path, name: str) -> None:
    backup = back_up(settings_for(url)(place), now=NOW)
    (member,) = {"store.sql", "store.dump"} & set(backup.manifest.members)
    script = f"SELECT 1;\n\\! touch '{tmp_path / 'ran'}'\n".encode()
    forged = repacked(backup.path, {name: script}, omitted=member)
    with pytest.raises(RestoreRefused, match=r"plain SQL script|pg_restore ended with code 1"):
        restore(forged, tmp_path / "new", settings_for(url), now=NOW, force=True)
    assert not (tmp_path / "ran").exists()
    assert ids(url) == ["t1", "t2", "t3"]


def test_a_rolled_back_adapter_is_not_revived_unasked(place: Path, url: str) -> None:
    store = open_store(url)
    backup = back_up(settings_for(url)(place), now=NOW)
    with write_session(store) as session:
        roll_back(session, ADAPTER, actor="ann", at=NOW, reason="it\tlies\\")
    other = back_up(settings_for(url)(place), now=NOW + timedelta(minutes=1))
    revived = f"revives {ADAPTER}: it would be live again, although ann rolled it back on 2026-03-20 12:00:00"
    with pytest.raises(RestoreRefused, match=revived):
        restore(backup.path, place, settings_for(url), now=NOW, force=True)
    done = restore(backup.path, place, settings_for(url), now=NOW, force=True, accept=lambda changes: True)
    assert [line.partition(" ")[0] for line in done.decisions] == ["revives", "loses"]
    late = NOW + timedelta(minutes=2)
    assert restore(other.path, place, settings_for(url), now=late, force=True, accept=lambda changes: True).aside_schema
    with read_session(store) as session:
        assert [entry.reason for entry in list_promotions(session, ADAPTER)][-1] == "it\tlies\\"
    store.dispose()


def test_a_swap_that_fails_after_the_load_is_repeated_with_force(
    place: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = back_up(settings_for(url)(place), now=NOW)
    add(url, "later")

    def refuse(*paths: Path) -> None:
        raise RestoreRefused("the directory cannot be replaced")

    with monkeypatch.context() as patched:
        patched.setattr("traced.maintenance.restore.put_in_place", refuse)
        with pytest.raises(RestoreRefused, match="cannot be replaced"):
            restore(backup.path, place, settings_for(url), now=NOW, force=True)
    assert ids(url) == ["t1", "t2", "t3"]
    assert (place / "adapters" / ADAPTER / "adapter_model.safetensors").exists()
    with pytest.raises(RestoreRefused, match="already holds"):
        restore(backup.path, tmp_path / "new", settings_for(url), now=NOW)
    later_now = NOW + timedelta(minutes=1)
    restored = restore(backup.path, place, settings_for(url), now=later_now, force=True)
    assert restored.aside is not None
    assert ids(url) == ["t1", "t2", "t3"]


def test_every_released_schema_upgrades_after_a_backup(url: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = settings_for(url)(tmp_path / "data")
    for version in known_revisions()[:-1]:
        engine = connect(url)
        migrate(engine, "base")
        migrate(engine, version)
        with pytest.raises(StoreVersionError, match="traced db upgrade"):
            open_store(url)
        assert schema_state(settings).state == "older"
        done = upgrade(settings, now=NOW)
        assert done.backup is not None
        assert verify(done.backup).schema == version
        assert revision(engine) == HEAD
        engine.dispose()


def tables(engine: Engine) -> object:
    with engine.connect() as connection:
        columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
        return sorted(connection.execute(text(columns)).all())


def test_a_migration_that_fails_half_way_changes_nothing(place: Path, url: str, tmp_path: Path) -> None:
    engine = connect(url)
    tables_before = tables(engine)
    with pytest.raises(StoreUnavailable, match="no_table"):
        upgrade(settings_for(url)(place), now=NOW, scripts=broken_migrations(tmp_path))
    assert tables(engine) == tables_before
    assert revision(engine) == HEAD
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM promotions")).scalar() == 1
    engine.dispose()


def test_the_quick_look_and_retention(place: Path, url: str) -> None:
    assert store_status(url).live == [ADAPTER]
    store = open_store(url)
    with write_session(store) as session:
        save_trajectories(session, [trajectory("spare", split="test")])
        set_cycle_state(session, "c1", CycleState.FINISHED, at=later(10))
    settings = load_settings(place, {"store.url": url, "retention.keep_cycles": 0})
    late = T0 + timedelta(days=3000)
    candidates = prune(settings, store, now=late, dry_run=True, owner="nobody")
    assert ids(url) == ["spare", "t1", "t2", "t3"]
    removed = {group.kind: group for group in prune(settings, store, now=late, owner="nobody")}
    assert [removed[group.kind].count for group in candidates] == [group.count for group in candidates]
    assert (removed["trajectories"].count, removed["token ids"].count) == (1, 4)
    assert removed["token ids"].size > 0
    assert ids(url) == ["t1", "t2", "t3"]
    assert store_status(url).live == [ADAPTER]
    store.dispose()
