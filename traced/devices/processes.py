"""Which processes belong to this service: the given roots and everything below them.

Not covered: processes of a service in another PID namespace (a container), which look foreign, as do children that
outlived a parent that was killed.
"""

from collections.abc import Iterable

import psutil


def trees(roots: Iterable[int]) -> frozenset[int]:
    """The ids of the ``roots`` and of all their descendants; those that have ended are left out."""
    return frozenset(process.pid for root in roots for process in _tree(root))


def _tree(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
