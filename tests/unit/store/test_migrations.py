"""Migrations up and down with data, agreement of models and migrations, and golden databases of old schemas."""

import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from store.database import (
    MIGRATIONS,
    connect,
    migrate,
    open_store,
    read_session,
    revision,
    sqlite_url,
    write_session,
)
from store.errors import StoreUnavailable, StoreVersionError
from store.repositories import llm_replies
from store.repositories.evidence import evidence_chain
from store.repositories.trajectories import get_trajectory
from store.schema_version import HEAD
from store.service_tables import METADATA
from tests.unit.store.chain import FINDING, GATE, save_chain, trajectory
from tests.unit.store.golden import DIGESTS, FOLDER, FULL, REVISIONS, columns, digest, golden_file, restore, schema


def dump(path: Path) -> list[str]:
    raw = sqlite3.connect(path)
    rows = list(raw.iterdump())
    raw.close()
    return rows


def select(path: Path, tables: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[Any, ...]]]:
    """Select the given columns of the given tables."""
    with closing(sqlite3.connect(path)) as raw:
        return {
            table: raw.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall() for table, names in tables.items()
        }


def test_models_and_migrations_agree(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_down_and_up_again_with_data(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
    migrate(engine, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    migrate(engine)
    with write_session(engine) as session:
        save_chain(session)
        assert evidence_chain(session, "date-reasoning@v1").missing == []


def test_downgrading_the_agent_tables_keeps_the_evidence(engine: Engine) -> None:
    with write_session(engine) as session:
        save_chain(session)
    migrate(engine, "0006")
    assert not {"model_replies", "citations", "faults", "prompt_patches"} & set(inspect(engine).get_table_names())
    migrate(engine)
    with read_session(engine) as session:
        chain = evidence_chain(session, "date-reasoning@v1")
        assert (chain.missing, chain.finding) == ([], FINDING)
        assert llm_replies.list_citations(session, "c1") == []


def test_the_newest_revision_is_known_without_alembic() -> None:
    assert REVISIONS[-1] == HEAD


@pytest.mark.parametrize("version", REVISIONS)
def test_the_golden_database_of_each_version_reads_after_an_upgrade(version: str, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    restore(version, path)
    with closing(sqlite3.connect(path)) as raw:
        old_columns = columns(raw)
    del old_columns["alembic_version"]
    old_rows = select(path, old_columns)
    engine = open_store(sqlite_url(path), upgrade=True)
    with read_session(engine) as session:
        chain = evidence_chain(session, "date-reasoning@v1")
        assert chain.missing == []
        assert chain.finding == FINDING
        assert [gate.result for gate in chain.gates] == [GATE]
        assert get_trajectory(session, "t1") == trajectory("t1")
        assert session.execute(text("SELECT version_num FROM alembic_version")).scalar() == REVISIONS[-1]
    engine.dispose()
    assert select(path, old_columns) == old_rows


@pytest.mark.parametrize("version", REVISIONS[:-1])
def test_an_older_database_changes_only_on_an_upgrade(version: str, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    restore(version, path)
    state_before = schema(path)
    with pytest.raises(StoreVersionError, match=rf"schema '{version}'.*needs '{HEAD}'; run `traced db upgrade`"):
        open_store(sqlite_url(path))
    assert schema(path) == state_before


def broken_migrations(folder: Path) -> Path:
    """Copy the released migrations and add one that fails after two changes."""
    scripts = folder / "migrations"
    shutil.copytree(MIGRATIONS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    (scripts / "versions" / "v9999_broken.py").write_text(
        f"from alembic import op\nrevision = '9999'\ndown_revision = '{HEAD}'\n"
        "def upgrade():\n    op.execute('CREATE TABLE half (n INTEGER)')\n    op.execute('DELETE FROM promotions')\n"
        "    op.execute('INSERT INTO no_table VALUES (1)')\n"
    )
    return scripts


def test_a_migration_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    engine = open_store(sqlite_url(tmp_path / "traced.db"))
    with write_session(engine) as session:
        save_chain(session)
    state_before = dump(tmp_path / "traced.db")
    with pytest.raises(StoreUnavailable, match="no such table: no_table"):
        migrate(engine, scripts=broken_migrations(tmp_path))
    assert revision(engine) == HEAD
    assert dump(tmp_path / "traced.db") == state_before
    engine.dispose()


@pytest.mark.parametrize("version", REVISIONS)
def test_released_migrations_create_the_same_schema(version: str, tmp_path: Path) -> None:
    restore(version, tmp_path / "golden.db")
    engine = connect(sqlite_url(tmp_path / "new.db"))
    migrate(engine, version)
    engine.dispose()
    assert schema(tmp_path / "new.db") == schema(tmp_path / "golden.db")
    assert digest(tmp_path / "new.db") == DIGESTS[version]


def test_every_version_has_a_digest_and_the_first_and_the_newest_a_golden_database() -> None:
    assert list(DIGESTS) == REVISIONS
    assert set(FOLDER.glob("*.sql")) == {golden_file(version) for version in FULL}
