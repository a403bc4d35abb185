"""What can go wrong in the store.

    StoreError
    ├── StoreUnavailable   the database cannot be opened, read or written (path, permission, disk, lock, driver)
    ├── StoreVersionError  the database's schema is older (`traced db upgrade`) or newer than this traced's
    ├── StoreConflict      an immutable row is there already, with other content
    ├── BrokenReference    a row refers to one that is not in the store, or breaks another constraint
    ├── NotFound           nothing is stored under this name or id
    ├── NotApproved        an adapter version cannot go live without a person's approval
    ├── NotLive            an adapter version that is not live cannot be rolled back
    └── LeaseLost          a device's lease lapsed and was taken, or was removed

Each message says the cause, the value seen and the next command to try.
"""


class StoreError(Exception):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """The database cannot be opened, read or written."""


class StoreVersionError(StoreError):
    """The database's schema is older or newer than this traced's, or could not be brought to it."""


class StoreConflict(StoreError):
    """An immutable row is there already, with other content."""


class BrokenReference(StoreError):
    """A row refers to one that is not in the store, or breaks another constraint."""


class NotFound(StoreError):
    """Nothing is stored under this name or id."""

    def __init__(self, kind: str, key: str, try_next: str = "`traced status` lists what there is") -> None:
        self.message, self.hint = f"there is no {kind} {key!r} in the store", try_next
        super().__init__(f"{self.message}; {self.hint}")


class NotApproved(StoreError):
    """An adapter version cannot go live without a person's approval."""


class NotLive(StoreError):
    """An adapter version that is not live cannot be rolled back."""


class LeaseLost(StoreError):
    """A device's lease lapsed and was taken, or was removed."""

    def __init__(self, device: str, holder: str, now_held_by: str | None) -> None:
        whose = f"{now_held_by!r} has it now" if now_held_by else "it was removed"
        super().__init__(
            f"the lease of {holder!r} on device {device!r} is lost: {whose}; stop using the device, "
            "`traced devices` shows who has it"
        )
