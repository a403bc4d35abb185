"""What can go wrong between the daemon and the machine that it lives on.

TracedError
└── HostError
    ├── AlreadyRunning          another live process holds the data directory
    ├── ServiceSilent           a live process holds the data directory and answers nobody
    ├── DataDirectoryUnusable   the lock file cannot be made or opened (read-only, no permission, no folder)
    ├── NoServiceManager        systemd is not this machine's (or this user's) service manager
    ├── UnitRefused             the unit cannot be written or removed as asked
    └── SystemctlFailed         systemctl was there and said no

The root of every error that traced raises on purpose.

    TracedError                 exit code 1; ``hint`` names the next command to try
    └── one errors.py per package derives its own tree from here

An error's text says the cause and the value seen; ``str(error)`` appends the hint, so that a log line is enough to act
on. Not covered: programming mistakes, which stay ordinary exceptions with their traceback.

What an exception comes down to: the known error inside an ExceptionGroup, and a full disk by its name.

Errors of gates and promotion.

traced.core.errors.TracedError
└── GateError                the evidence cannot be compared (pairs missing, too many infrastructure outcomes)
└── PromotionError           an adapter version cannot be published, approved, rejected or rolled back

What can go wrong in a stage of the cycle.

TracedError
└── StageError            the cycle stops at its last checkpoint; the same command carries on from there
    ├── CycleChanged      the cycle cannot go on: its last step is unreadable or of another version of the graph
    └── CapabilityError   one capability ends here, with this reason; the cycle goes on without it
"""

import errno
import sys


class TracedError(Exception):
    """Something that a person can act on went wrong."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class ConfigError(TracedError):
    """The configuration cannot be used as it stands: an unknown key, a bad value, an unreadable file."""

    exit_code = 2


class DiskError(TracedError):
    """A file could not be written; nothing half-written is left behind."""


def cause_of(error: Exception) -> Exception:
    """What a person can act on."""
    if isinstance(error, ExceptionGroup):
        causes = [cause_of(inner) for inner in error.exceptions]
        return next((cause for cause in causes if is_known(cause)), causes[0])
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        full = TracedError(f"the disk is full: {error}", hint="free some space and run the same command again")
        full.__cause__ = error
        return full
    return error


def is_known(error: BaseException) -> bool:
    """Whether traced raised it on purpose: it is no defect."""
    return isinstance(error, _known_errors())


def _known_errors() -> tuple[type[Exception], ...]:
    """The roots of the packages' error trees, of those packages that are loaded: only they can have raised."""
    trees = {"store.errors": "StoreError", "sandbox.errors": "SandboxError", "agents.errors": "AgentsError"}
    loaded = [getattr(sys.modules[module], name) for module, name in trees.items() if module in sys.modules]
    return (TracedError, *loaded)


class GateError(TracedError):
    """The two sets of episodes cannot be compared."""


class PromotionError(TracedError):
    """The adapter version is not in a state that allows this."""


class HostError(TracedError):
    """The daemon and its host do not get along."""


class AlreadyRunning(HostError):
    """Another live process holds the data directory."""


class ServiceSilent(HostError):
    """A live process holds the data directory and answers nobody."""


class DataDirectoryUnusable(HostError):
    """The lock file of the data directory cannot be made or opened."""


class NoServiceManager(HostError):
    """systemd is not this machine's (or this user's) service manager."""


class UnitRefused(HostError):
    """The unit cannot be written or removed as asked."""


class SystemctlFailed(HostError):
    """systemctl was there and said no."""


class StageError(TracedError):
    """A stage of the cycle could not do its work."""


class CycleChanged(StageError):
    """An unfinished cycle cannot be carried on by this version."""


class CapabilityError(StageError):
    """A capability came to its end before an adapter passed its gate."""
