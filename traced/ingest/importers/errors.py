"""Errors of reading trajectory files.

ImportFailed          (exit code 1)
├── UnreadableFile    the file cannot be opened, or its structure is not that of its format
│   └── UnknownFormat the first bytes match no format, or not the requested one
├── NoTrajectories    the file was read to its end and holds no trajectory
├── AlreadyRunning    another process imports the same file
└── BadRecord         one record is invalid; names file, record, line and column

RecordFormatError says why a JSON value is not a record of its format; readers convert it to a BadRecord.
"""

from pathlib import Path

from traced.core.errors import TracedError


class ImportFailed(TracedError):
    """Trajectories could not be imported."""


class UnreadableFile(ImportFailed):
    """The file cannot be opened, or its structure is not that of its format."""


class UnknownFormat(UnreadableFile):
    """The first bytes of the file match no format, or not the requested one."""


class NoTrajectories(ImportFailed):
    """The file was read to its end and holds no trajectory."""


class AlreadyRunning(ImportFailed):
    """Another process imports the same file."""


class RecordFormatError(ValueError):
    """A JSON value is not a record of its format; the message says why."""


class BadRecord(ImportFailed):
    """One record is invalid.

    ``record``, ``line`` and ``column`` count from 1, columns in characters. ``raw`` is the redacted text of the record,
    "" if only its position may be reported.
    """

    def __init__(self, path: Path, record: int, line: int, column: int, cause: str, *, raw: str = "") -> None:
        location = f"{path}: record {record}, line {line}, column {column}"
        super().__init__(f"{location}: {cause}", hint="repair the record, or leave out --strict to skip it")
        self.path, self.record, self.line, self.column, self.cause, self.raw = path, record, line, column, cause, raw
