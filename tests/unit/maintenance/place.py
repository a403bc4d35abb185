"""A data directory with a sample of every kind of file, for tests of maintenance."""

import hashlib
import io
import json
import sqlite3
import tarfile
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import zstandard
from sqlalchemy import update

from store.database import open_store, write_session
from store.tables import AdapterRow
from tests.unit.store.chain import HASH, SOURCE, save_chain
from traced.config.settings import Settings, load_settings
from traced.maintenance import archive
from traced.maintenance.archive import Manifest

NOW = datetime(2026, 3, 20, 12, 0, tzinfo=UTC)
ADAPTER = "date-reasoning@v1"
WEIGHTS = bytes(range(256)) * 300


def settings_at(data_dir: Path) -> Settings:
    return load_settings(data_dir)


def fill(data_dir: Path) -> Settings:
    """Create a data directory with the chain of ``tests.unit.store.chain``, its adapter's files and files of a run."""
    data_dir.mkdir(parents=True)
    (data_dir / "traced.toml").write_text("seed = 5\n")
    settings = load_settings(data_dir)
    store = open_store(settings.store_url)
    with write_session(store) as session:
        save_chain(session)
        files = {"adapter_model.safetensors": hashlib.sha256(WEIGHTS).hexdigest()}
        session.execute(update(AdapterRow).values(path=str(data_dir / "adapters" / ADAPTER), files=files))
    store.dispose()
    with closing(sqlite3.connect(data_dir / "checkpoints.db")) as checkpoints:
        columns = "thread_id TEXT, checkpoint_ns TEXT, checkpoint_id TEXT, checkpoint BLOB"
        checkpoints.execute(f"CREATE TABLE checkpoints ({columns})")
        checkpoints.execute("INSERT INTO checkpoints VALUES ('c1', '', '1', x'00')")
        checkpoints.commit()
    write(data_dir / "adapters" / ADAPTER / "adapter_model.safetensors", WEIGHTS).chmod(0o444)
    write(data_dir / "adapters" / ADAPTER / "manifest.json", json.dumps({"name": ADAPTER}).encode()).chmod(0o444)
    write(data_dir / "adapters" / ".staging-x@v2" / "adapter_model.safetensors", b"half")
    write(data_dir / "environments" / f"{HASH}.py", SOURCE.encode())
    write(data_dir / "runs" / "c1" / "report.html", b"<p>report</p>")
    write(data_dir / "runs" / "c1" / "training" / "x" / "checkpoints" / "checkpoint-5" / "optimizer.pt", b"o" * 1000)
    write(data_dir / "logs" / "engine-1.log", b"a line\n")
    return settings


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def loose_entries(data_dir: Path, bits: int = 0o077) -> list[Path]:
    """Return the files and folders of which group or others have one of the permission ``bits``."""
    paths = [data_dir, *sorted(data_dir.rglob("*"))] if data_dir.exists() else []
    return [path for path in paths if not path.is_symlink() and path.stat().st_mode & bits]


def tree(folder: Path, predicate: Callable[[Path], bool] = lambda path: True) -> dict[str, bytes]:
    """Return every file below ``folder`` that the predicate accepts, with its content."""
    files = [path for path in folder.rglob("*") if path.is_file() and predicate(path)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(files)}


def repacked(backup_file: Path, extra: dict[str, bytes], *, omitted: str = "") -> Path:
    """Write a backup with other files, and the manifest that fits them, as a forger would."""
    content = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(backup_file.read_bytes())).readall()
    old = archive.verify(backup_file)
    target = backup_file.with_name("forged.tar.zst")
    with tarfile.open(fileobj=io.BytesIO(content)) as source, archive.writing(target) as writer:
        files = {name: source.extractfile(name).read() for name in old.members if name != omitted} | extra  # type: ignore[union-attr]
        for name, data in files.items():
            file = backup_file.with_name("member")
            file.write_bytes(data)
            writer.add(name, file)
        fields = (old.traced, old.made_at, old.data_dir, old.database, old.schema, old.namespace)
        writer.close_with(Manifest(*fields, writer.members))
    return target


def rows(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return list(connection.iterdump())
