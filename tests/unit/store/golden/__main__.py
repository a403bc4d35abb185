"""Dump the test chain at the newest schema as SQL text."""

import sqlite3
import tempfile
from pathlib import Path

from sqlalchemy import text

from store.database import open_store, sqlite_url, write_session
from tests.unit.store.chain import save_chain

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "chain.db"
    engine = open_store(sqlite_url(path))
    with write_session(engine) as session:
        save_chain(session)
        revision = session.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    engine.dispose()
    raw = sqlite3.connect(path)
    (Path(__file__).parent / f"v{revision}.sql").write_text("\n".join(raw.iterdump()) + "\n")
    raw.close()
