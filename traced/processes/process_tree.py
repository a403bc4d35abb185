"""Find, measure and kill the processes of a child: its descendants, and those that left its process tree.

Every child carries a mark in its environment that all its descendants inherit, so that a process which left the group
or session (setsid(2), a double fork) is still recognised. Not covered: a process that clears its environment and leaves
the tree; processes of another user.
"""

from collections.abc import Iterator

import psutil

# Not TRACED_...: variables with that prefix are settings.
MARK_VARIABLE = "_TRACED_CHILD"
MARK_SEPARATOR = ";"
KILL_ROUNDS = 10
WAIT_S = 5.0
# OSError as well: for a process that is just exiting the kernel answers EIO for a moment.
ACCESS_ERRORS = (psutil.Error, OSError)


def marked_processes(mark: str) -> Iterator[psutil.Process]:
    """Yield live processes with ``mark`` or a mark that starts with ``mark#`` (all children of one holder)."""
    for process in psutil.process_iter():
        try:
            marks = process.environ().get(MARK_VARIABLE, "").split(MARK_SEPARATOR)
            if any(value == mark or value.startswith(f"{mark}#") for value in marks) and _is_live(process):
                yield process
        except ACCESS_ERRORS:
            continue


def kill_marked(mark: str, spare: int = 0) -> list[psutil.Process]:
    """Kill all processes with ``mark``, except process ``spare``, and return the survivors."""
    survivors: list[psutil.Process] = []
    # In rounds, because a process may have started another one after it was listed.
    for _ in range(KILL_ROUNDS):
        survivors = [process for process in marked_processes(mark) if process.pid != spare]
        if not survivors:
            break
        for process in survivors:
            _kill(process)
        _, survivors = psutil.wait_procs(survivors, timeout=WAIT_S)
    return [process for process in survivors if _is_live(process)]


def tree_rss(pid: int) -> int:
    """Sum the resident bytes of a process and its descendants; shared pages count once per process."""
    return sum(_rss(process) for process in _tree(pid))


def tree_pss(pid: int) -> int:
    """Sum the proportional set sizes: shared pages are divided among their users (proc(5), smaps_rollup); slower."""
    return sum(_pss(process) for process in _tree(pid))


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except ACCESS_ERRORS:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except ACCESS_ERRORS:
        return 0


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except ACCESS_ERRORS:
        return _rss(process)


def _is_live(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except ACCESS_ERRORS:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except ACCESS_ERRORS:
        return
