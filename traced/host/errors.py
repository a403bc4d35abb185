"""What can go wrong between the daemon and the machine that it lives on.

TracedError
└── HostError
    ├── AlreadyRunning          another live process holds the data directory
    ├── ServiceSilent           a live process holds the data directory and answers nobody
    ├── DataDirectoryUnusable   the lock file cannot be made or opened (read-only, no permission, no folder)
    ├── NoServiceManager        systemd is not this machine's (or this user's) service manager
    ├── UnitRefused             the unit cannot be written or removed as asked
    └── SystemctlFailed         systemctl was there and said no
"""

from traced.errors import TracedError


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
