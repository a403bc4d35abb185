"""Readers of other tools' trajectory files: ``FORMATS`` maps a format's name to its reader (see ``reading``)."""

from traced.importers.errors import BadRecord, ImportFailed, NothingFound, UnknownFormat, UnreadableFile
from traced.importers.formats import FORMATS, format_of
from traced.importers.reading import Reader, Reading, Step

__all__ = [
    "FORMATS",
    "BadRecord",
    "ImportFailed",
    "NothingFound",
    "Reader",
    "Reading",
    "Step",
    "UnknownFormat",
    "UnreadableFile",
    "format_of",
]
