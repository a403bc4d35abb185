"""Errors that the store raises.

    StoreError
    ├── StoreUnavailable   the database cannot be opened, read or written (path, permission, disk, lock, driver)
    ├── StoreVersionError  the database schema is older (`traced db upgrade`) or newer than this version of traced
    ├── StoreConflict      an immutable row exists already with different content
    ├── BrokenReference    a row refers to a missing row, or breaks another constraint
    ├── NotFound           nothing is stored under this name or id
    ├── NotApproved        an adapter version cannot go live without a person's approval
    ├── NotLive            an adapter version that is not live cannot be rolled back
    └── LeaseLost          the lease of a device expired and was taken over, or was deleted

Each message states the cause, the value seen and the next command to try.
"""


class StoreError(Exception):
    """A store operation failed."""


class StoreUnavailable(StoreError):
    """The database cannot be opened, read or written."""


class StoreVersionError(StoreError):
    """The database schema is older or newer than this version of traced, or could not be migrated."""


class StoreConflict(StoreError):
    """An immutable row exists already with different content."""


class BrokenReference(StoreError):
    """A row refers to a missing row, or breaks another constraint."""


class NotFound(StoreError):
    """Nothing is stored under this name or id."""

    def __init__(self, kind: str, key: str, hint: str = "`traced status` lists what there is") -> None:
        self.message, self.hint = f"there is no {kind} {key!r} in the store", hint
        super().__init__(f"{self.message}; {self.hint}")


class NotApproved(StoreError):
    """An adapter version cannot go live without a person's approval."""


class NotLive(StoreError):
    """An adapter version that is not live cannot be rolled back."""


class LeaseLost(StoreError):
    """The lease of a device expired and was taken over, or was deleted."""

    def __init__(self, device: str, holder: str, now_held_by: str | None) -> None:
        outcome = f"{now_held_by!r} has it now" if now_held_by else "it was removed"
        super().__init__(
            f"the lease of {holder!r} on device {device!r} is lost: {outcome}; stop using the device, "
            "`traced devices` shows who has it"
        )
