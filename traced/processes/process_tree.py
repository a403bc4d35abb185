"""The processes of a child: its descendants, their memory, and whoever got away from it.

Every child carries a mark in its environment, and whatever it starts inherits it. A process that leaves the child's
process group or session (setsid(2), a double fork) still carries the mark, so that ending a child ends all of it.
Not covered: a process that clears its environment and leaves the tree; processes of another user.
"""

from collections.abc import Iterator

import psutil

MARK = "_TRACED_CHILD"  # no TRACED_ prefix: it is no setting
SEPARATOR = ";"
ROUNDS = 10
WAIT_S = 5.0
GONE = (psutil.Error, OSError)  # gone, somebody else's, or half gone: the kernel answers EIO for some moments


def marked(mark: str) -> Iterator[psutil.Process]:
    """Live processes that carry ``mark``, or any mark that starts with ``mark#`` (all children of one holder)."""
    for process in psutil.process_iter():
        try:
            marks = process.environ().get(MARK, "").split(SEPARATOR)
            if any(each == mark or each.startswith(f"{mark}#") for each in marks) and _runs(process):
                yield process
        except GONE:
            continue


def end_marked(mark: str, spare: int = 0) -> list[psutil.Process]:
    """Kill what carries ``mark`` (but process ``spare``) until nothing does, ``ROUNDS`` times; those that are left."""
    left: list[psutil.Process] = []
    for _ in range(ROUNDS):
        left = [process for process in marked(mark) if process.pid != spare]
        if not left:
            break
        for process in left:
            _kill(process)
        _, left = psutil.wait_procs(left, timeout=WAIT_S)
    return [process for process in left if _runs(process)]


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants together; shared pages count once for each of them."""
    return sum(_rss(process) for process in _tree(pid))


def tree_pss(pid: int) -> int:
    """As ``tree_rss``, with shared pages divided among those who share them (proc(5), smaps_rollup); slower."""
    return sum(_pss(process) for process in _tree(pid))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except GONE:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except GONE:
        return 0


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except GONE:
        return _rss(process)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except GONE:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except GONE:
        return
