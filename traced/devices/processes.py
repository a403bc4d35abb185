"""Which processes belong to this service: the given roots and everything below them; and the names of leases' holders.

Not covered: processes of a service in another PID namespace (a container), which look foreign, as do children that
outlived a parent that was killed.
"""

from collections.abc import Iterable

import psutil


def trees(roots: Iterable[int]) -> frozenset[int]:
    """The ids of the ``roots`` and of all their descendants; those that have ended are left out."""
    return frozenset(process.pid for root in roots for process in _tree(root))


def holder_name(host: str, pid: int, token: str) -> str:
    """The name under which process ``pid`` of ``host`` holds one lease; ``token`` tells its leases apart."""
    return f"{host}/{pid}/{token}"


def holder_pid(holder: str, host: str) -> int | None:
    """The process behind a name that ``holder_name`` made on ``host``; None for any other name."""
    place, _, rest = holder.partition("/")
    pid = rest.partition("/")[0]
    return int(pid) if place == host and pid.isdecimal() else None


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
