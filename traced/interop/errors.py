"""What can go wrong between traced and other projects' environments.

InteropError            (exit code 1)
├── NoSuchEnvironment   no file of that name, and no or more than one stored environment begins with that hash
├── NotExportable       the source cannot become a package as it stands
├── InTheWay            there is something where the package would be written
└── NotRecognised       a folder holds no environment of a known kind, or several
"""

from traced.errors import TracedError


class InteropError(TracedError):
    """An environment could not be exported or recognised."""


class NoSuchEnvironment(InteropError):
    """No file of that name, and no or more than one stored environment begins with that hash."""


class NotExportable(InteropError):
    """The source cannot become a package as it stands."""


class InTheWay(InteropError):
    """There is something where the package would be written."""


class NotRecognised(InteropError):
    """A folder holds no environment of a known kind, or several."""
