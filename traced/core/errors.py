"""The root of all errors that traced raises on purpose, and the errors that several packages share.

    TracedError                     exit code 1; ``hint`` names the next command to try
    ├── ConfigError                 exit code 2
    ├── DiskError
    ├── GateError                   the episodes cannot be compared (missing pairs, infrastructure failures)
    ├── PromotionError              an adapter version cannot be published, approved, rejected or rolled back
    │   └── AdapterChanged          its files are not those that were published
    ├── HostError
    │   ├── AlreadyRunning          another live process holds the data directory
    │   ├── ServiceSilent           a live process holds the data directory and does not respond
    │   ├── DataDirectoryUnusable   its lock file cannot be opened (read-only, no folder), or others can write it
    │   ├── NoServiceManager        systemd is not the service manager of this machine (or user)
    │   ├── UnitRefused             the unit file cannot be written or removed
    │   └── SystemctlFailed         systemctl reported an error
    └── StageError                  the cycle stops at its last checkpoint; the same command resumes it
        ├── CycleChanged            its last step is unreadable or belongs to another version of the graph
        └── CapabilityError         this capability ends; the cycle continues without it

Other packages derive their own trees in their ``errors.py``. A message states the cause and the value seen;
``str(error)`` appends the hint, so a log line is enough to act on. Programming errors stay ordinary exceptions.
"""

import errno
import sys


class TracedError(Exception):
    """An error that a person can act on."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class ConfigError(TracedError):
    """The configuration is invalid: an unknown key, a bad value or an unreadable file."""

    exit_code = 2


class DiskError(TracedError):
    """A file could not be written; no partial file is left."""


class GateError(TracedError):
    """The two sets of episodes cannot be compared."""


class PromotionError(TracedError):
    """An adapter version cannot be published, approved, rejected or rolled back."""


class AdapterChanged(PromotionError):
    """The files of an adapter version are not those that were published; ``reason`` names the files."""

    def __init__(self, adapter: str, reason: str) -> None:
        super().__init__(
            f"{adapter} is not what was published: {reason}",
            hint=f"restore its files from a backup, then: traced verify --release {adapter}",
        )
        self.adapter = adapter
        self.reason = reason


class HostError(TracedError):
    """The daemon cannot use its host or data directory."""


class AlreadyRunning(HostError):
    """Another live process holds the data directory."""


class ServiceSilent(HostError):
    """A live process holds the data directory and does not respond."""


class DataDirectoryUnusable(HostError):
    """The data directory's lock file cannot be created or opened, or other users can write the directory."""


class NoServiceManager(HostError):
    """systemd is not the service manager of this machine (or user)."""


class UnitRefused(HostError):
    """The unit file cannot be written or removed."""


class SystemctlFailed(HostError):
    """systemctl reported an error."""


class StageError(TracedError):
    """A stage of the cycle failed."""


class CycleChanged(StageError):
    """An unfinished cycle cannot be resumed by this version."""


class CapabilityError(StageError):
    """A capability ended before an adapter passed its gate."""


def cause_of(error: Exception) -> Exception:
    """Return the actionable cause: an expected error in an ``ExceptionGroup``, or a ``TracedError`` for a full disk."""
    if isinstance(error, ExceptionGroup):
        causes = [cause_of(inner) for inner in error.exceptions]
        return next((cause for cause in causes if is_expected(cause)), causes[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = TracedError(f"the disk is full: {error}", hint="free some space and run the same command again")
        full.__cause__ = error
        return full
    return error


def is_expected(error: BaseException) -> bool:
    """Whether traced raised the error on purpose, so that it is not a defect."""
    return isinstance(error, _known_errors())


def _known_errors() -> tuple[type[Exception], ...]:
    """Return the roots of the error trees of all loaded packages."""
    # Only a loaded package can have raised; importing the others would slow every command down.
    trees = {"store.errors": "StoreError", "sandbox.errors": "SandboxError", "agents.errors": "AgentsError"}
    loaded = [getattr(sys.modules[module], name) for module, name in trees.items() if module in sys.modules]
    return (TracedError, *loaded)
