"""A database file beside an import, for what does not fit into memory; the import's ledger removes it at the end."""

import sqlite3
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from traced.ingest.importers.errors import ImportFailed


class ScratchFile:
    """A database whose tables a subclass names; as a context manager it is open.

    Raises:
        ImportFailed: The disk is full, or the file is not a database.
    """

    SCHEMA: ClassVar[str]

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._database = sqlite3.connect(self._path)
        try:
            self._database.execute("PRAGMA journal_mode=WAL")
            # The import continues after these rows, so that they must not be lost when its progress is kept.
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(self.SCHEMA)
        except sqlite3.DatabaseError as error:
            raise ImportFailed(f"{self._path}: {error}", hint="traced import --from-start") from error
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._database.close()
        if isinstance(error, sqlite3.Error):
            hint = "free disk space, then run the same command again"
            raise ImportFailed(f"{self._path}: {error}", hint=hint) from error

    def commit(self) -> None:
        """Commit what was added so far, so that it is kept if the import is killed."""
        self._database.commit()
