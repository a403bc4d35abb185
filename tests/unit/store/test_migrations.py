"""Migrations up and down with data, agreement of models and migrations, and one golden database per schema version."""

import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text

import store.service_tables  # noqa: F401 - its tables belong to the metadata
from store.database import alembic_config, connect, migrate, open_store, reading, session, sqlite_url
from store.repositories.evidence import evidence_chain
from store.repositories.trajectories import get_trajectory
from store.tables import Row
from tests.unit.store.chain import FINDING, GATE, save_chain, trajectory

GOLDEN = Path(__file__).parent / "golden"
REVISIONS = [script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()][::-1]


def schema(path: Path) -> set[str]:
    with sqlite3.connect(path) as raw:
        found = raw.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    raw.close()
    return {" ".join(sql.split()) for (sql,) in found}


def restore(revision: str, path: Path) -> None:
    raw = sqlite3.connect(path)
    raw.executescript((GOLDEN / f"v{revision}.sql").read_text())
    raw.close()


def test_models_and_migrations_agree(engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Row.metadata) == []


def test_down_and_up_again_with_data(engine: Engine) -> None:
    with session(engine) as opened:
        save_chain(opened)
    migrate(engine, "base")
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    migrate(engine)
    with session(engine) as opened:
        save_chain(opened)
        assert evidence_chain(opened, "date-reasoning@v1").missing == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_golden_database_of_each_version_reads_at_head(revision: str, tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    restore(revision, path)
    engine = open_store(sqlite_url(path))
    with reading(engine) as opened:
        chain = evidence_chain(opened, "date-reasoning@v1")
        assert chain.missing == []
        assert chain.finding == FINDING
        assert [gate.result for gate in chain.gates] == [GATE]
        assert get_trajectory(opened, "t1") == trajectory("t1")
        assert opened.execute(text("SELECT version_num FROM alembic_version")).scalar() == REVISIONS[-1]
    engine.dispose()


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_released_migration_still_makes_the_schema_it_made(revision: str, tmp_path: Path) -> None:
    restore(revision, tmp_path / "golden.db")
    engine = connect(sqlite_url(tmp_path / "new.db"))
    migrate(engine, revision)
    engine.dispose()
    assert schema(tmp_path / "new.db") == schema(tmp_path / "golden.db")


def test_every_version_has_a_golden_database() -> None:
    assert sorted(path.name for path in GOLDEN.glob("*.sql")) == [f"v{revision}.sql" for revision in REVISIONS]
