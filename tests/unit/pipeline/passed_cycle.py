"""The context of a cycle one adapter of which has passed its gate."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console

from store.database import open_store, sqlite_url, write_session
from tests.desk import DESK
from tests.unit.registry.chain import seed_adapter, seed_cycle
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline.context import Context


@contextmanager
def passed_cycle(folder: Path) -> Iterator[Context]:
    """Create cycle c1 of the desk with the adapter error-recovery@v1, which has passed its gate."""
    store = open_store(sqlite_url(folder / "traced.db"))
    with write_session(store) as session:
        seed_cycle(session)
        seed_adapter(session, folder, 1)
    progress = Progress(Console(file=StringIO()))
    yield Context(load_settings(folder), store, DESK, ModelFiles("m", folder), "c1", progress, Meter())
    store.dispose()
