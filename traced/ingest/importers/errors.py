"""What can go wrong while trajectory files are read.

ImportFailed          (exit code 1)
├── UnreadableFile    the file cannot be opened, or is no file of its format as a whole
│   └── UnknownFormat the file's beginning tells no format
├── NothingFound      the file was read to its end and held no trajectory
├── AlreadyRunning    another process imports the same file
└── BadRecord         one record is damaged; names file, record, line and column

Damage says why a value that is JSON is no record of its format; readers turn it into a BadRecord.
"""

from pathlib import Path

from traced.core.errors import TracedError


class ImportFailed(TracedError):
    """Trajectories could not be imported."""


class UnreadableFile(ImportFailed):
    """The file cannot be opened, or is no file of its format as a whole."""


class UnknownFormat(UnreadableFile):
    """The file's beginning tells no format, or another one than the format that was named."""


class NothingFound(ImportFailed):
    """The file was read to its end and held no trajectory."""


class AlreadyRunning(ImportFailed):
    """Another process imports the same file."""


class Damage(ValueError):
    """Why a value that is JSON is still no record of its format."""


class BadRecord(ImportFailed):
    """One record is damaged. ``record`` counts from 1, ``line`` and ``column`` from 1 (column in characters).

    ``raw`` is the record's own text as far as it may be kept; "" where only its place may be told.
    """

    def __init__(self, path: Path, record: int, line: int, column: int, cause: str, *, raw: str = "") -> None:
        where = f"{path}: record {record}, line {line}, column {column}"
        super().__init__(f"{where}: {cause}", hint="repair the record, or leave --strict out: it is then kept aside")
        self.path, self.record, self.line, self.column, self.cause, self.raw = path, record, line, column, cause, raw
