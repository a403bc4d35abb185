"""Errors of maintenance.

traced.core.errors.TracedError
└── UpkeepError
    ├── BackupFailed       no backup could be written; nothing half-written is left
    ├── BackupDamaged      a backup is not whole: cut off, altered, or not made by traced
    └── RestoreRefused     the backup does not fit this version or this place; nothing was changed
"""

from traced.core.errors import TracedError


class UpkeepError(TracedError):
    """Base class of the errors of maintenance."""


class BackupFailed(UpkeepError):
    """No backup could be written."""


class BackupDamaged(UpkeepError):
    """A backup is cut off, altered, or not made by traced."""


class RestoreRefused(UpkeepError):
    """The backup does not fit this version of traced or the place to restore it to."""
