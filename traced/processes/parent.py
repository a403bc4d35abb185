"""End a child process when its parent ends; standard library only, because engines import it in another Python.

Two mechanisms are used, because each misses cases that the other covers. Standard input closes when the parent ends,
however and whenever that was, but a thread of this process has to notice. The kernel's parent-death signal (prctl(2),
PR_SET_PDEATHSIG) needs no thread, but is not sent for a parent that died before it was requested. Other systems than
Linux have the pipe alone. A process killed by its alarm leaves its descendants to the next start of the service
(``traced.processes.process_tree.kill_marked``).
"""

import ctypes
import os
import signal
import sys
import threading

PR_SET_PDEATHSIG = 1

_orphaned = threading.Event()


def follow_parent(grace_s: float) -> None:
    """Stop this process when its parent ends: SIGTERM, then the kernel's alarm after ``grace_s`` seconds.

    Args:
        grace_s: Time for an orderly stop; 0 ends the process at once.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    request_death_signal(signal.SIGTERM if grace_s else signal.SIGKILL)
    threading.Thread(target=_wait_for_end_of_parent, args=(grace_s,), name="parent-watch", daemon=True).start()


def request_death_signal(number: signal.Signals) -> None:
    """Ask the kernel to send this signal to the process once its parent ends; does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def arm_alarm(seconds: float) -> None:
    """Let the kernel kill this process in ``seconds`` unless the alarm is armed again before."""
    # An orphan's alarm already counts its grace time and must not be put off by a heartbeat.
    if not _orphaned.is_set():
        signal.setitimer(signal.ITIMER_REAL, seconds)


def kill_descendants() -> None:
    """Kill the descendants that this process left running, at the end of an orderly stop."""
    # Unconditionally, because whether the parent still lives cannot be known: its death signal is sent when the thread
    # that forked ends, possibly before its pipes are closed.
    # Imported here, because process_tree needs psutil and this module must import in a Python without it.
    from traced.processes.process_tree import MARK_SEPARATOR, MARK_VARIABLE, kill_marked

    kill_marked(os.environ[MARK_VARIABLE].rpartition(MARK_SEPARATOR)[2], spare=os.getpid())


def _wait_for_end_of_parent(grace_s: float) -> None:
    while os.read(0, 4096):
        continue
    if not grace_s:
        os._exit(0)
    _orphaned.set()
    signal.setitimer(signal.ITIMER_REAL, grace_s)
    _discard_output()
    os.kill(os.getpid(), signal.SIGTERM)


def _discard_output() -> None:
    # The pipe's reader is gone, and printing into it would raise during the orderly stop.
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)
