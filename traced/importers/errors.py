"""What can go wrong while trajectory files are read.

ImportFailed        (exit code 1)
├── UnreadableFile  the file cannot be opened, or is no file of its format as a whole
└── BadRecord       one record is damaged; names file, record, line and column
"""

from pathlib import Path

from traced.errors import TracedError


class ImportFailed(TracedError):
    """Trajectories could not be imported."""


class UnreadableFile(ImportFailed):
    """The file cannot be opened, or is no file of its format as a whole."""


class BadRecord(ImportFailed):
    """One record is damaged. ``record`` counts from 1, ``line`` and ``column`` from 1 (column in characters)."""

    def __init__(self, path: Path, record: int, line: int, column: int, cause: str) -> None:
        where = f"{path}: record {record}, line {line}, column {column}"
        super().__init__(f"{where}: {cause}", hint="repair the record, or import with --skip-bad to leave it out")
        self.path, self.record, self.line, self.column, self.cause = path, record, line, column, cause
