"""The child's side of living no longer than its parent.

Two ways, because each misses what the other sees: the pipe on standard input closes when the parent is gone, however
it ended and whenever that was, but a thread of this process has to notice; the kernel's parent-death signal (prctl(2),
PR_SET_PDEATHSIG) needs nobody, but is not sent for a parent that died before it was asked for.

``grace_s`` 0 ends this process at once. Otherwise it is asked to stop (SIGTERM), and the kernel's alarm, which needs no
Python to run, ends it when that takes longer; ``last_act`` ends what it started and did not end itself.
Not covered: other systems than Linux have the pipe alone; a process killed by its alarm leaves what it started to the
next start of the service (``traced.processes.process_tree.end_marked``).
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1

_orphaned = threading.Event()


def follow_parent(grace_s: float) -> None:
    """End this process when its parent is gone, after ``grace_s`` seconds for an orderly stop (0: at once)."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    ask_for_death_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
    threading.Thread(target=_watch, args=(grace_s,), name="parent-watch", daemon=True).start()


def ask_for_death_signal(number: signal.Signals) -> None:
    """Have the kernel send this to the process once its parent ends; without Linux nothing is asked for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def arm(seconds: float) -> None:
    """Let the kernel end this process in ``seconds`` unless it is armed again before; no longer than its grace."""
    if not _orphaned.is_set():
        signal.setitimer(signal.ITIMER_REAL, seconds)


def last_act() -> None:
    """End what this process started and did not end itself; for the end of an orderly stop.

    Whether the parent is there to do it cannot be asked: its death signal comes when the thread that forked has ended,
    which may be before its pipes are closed.
    """
    from traced.processes.process_tree import MARK, SEPARATOR, end_marked

    end_marked(os.environ[MARK].rpartition(SEPARATOR)[2], spare=os.getpid())


def _watch(grace_s: float) -> None:
    while os.read(0, 4096):
        continue
    if not grace_s:
        os._exit(0)  # nobody is left to answer, so nothing needs an orderly end
    _orphaned.set()
    signal.setitimer(signal.ITIMER_REAL, grace_s)
    _silence()
    os.kill(os.getpid(), signal.SIGTERM)


def _silence() -> None:
    """Nobody reads this process's output any more: let it go nowhere instead of failing who prints."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
