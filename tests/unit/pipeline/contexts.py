"""A context over a store with a complete chain, without an engine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console
from sqlalchemy import update

from store.database import open_store, sqlite_url, write_session
from store.tables import AdapterRow
from tests.unit.store.chain import adapter, save_chain, with_files
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline.context import Context
from traced.targets.registry import target


@contextmanager
def context_with_chain(folder: Path, overrides: Mapping[str, object]) -> Iterator[Context]:
    """Yield the context of cycle "c1" with these settings, on the desk if they name no other target."""
    store = open_store(sqlite_url(folder / "traced.db"))
    with write_session(store) as session:
        save_chain(session)
        version = with_files(adapter(), folder)
        session.execute(update(AdapterRow).values(path=version.path, files=version.files))
    progress = Progress(Console(file=StringIO()))
    settings = load_settings(folder, dict(overrides))
    yield Context(settings, store, target(settings), ModelFiles("tiny", folder), "c1", progress, Meter())
    store.dispose()
