"""Dump the test chain at the newest schema as SQL text, and store the digest of that schema."""

import json
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from store.database import open_store, sqlite_url, write_session
from store.schema_version import HEAD
from tests.unit.store.chain import save_chain
from tests.unit.store.golden import DIGESTS, DIGESTS_FILE, FOLDER, FULL, digest, golden_file

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "chain.db"
    engine = open_store(sqlite_url(path))
    with write_session(engine) as session:
        save_chain(session)
    engine.dispose()
    with closing(sqlite3.connect(path)) as raw:
        golden_file(HEAD).write_text("\n".join(raw.iterdump()) + "\n")
    DIGESTS_FILE.write_text(json.dumps(DIGESTS | {HEAD: digest(path)}, indent=2) + "\n")
for file in set(FOLDER.glob("v*.sql")) - {golden_file(version) for version in FULL}:
    file.unlink()
