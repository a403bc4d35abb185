"""Who holds something: a process named so that a later process can tell whether it is still there.

A holder's text is ``host/boot/pid/ticks``: host name, the kernel's boot id, process id, and the process's start in
clock ticks since boot (proc(5), field 22 of ``/proc/PID/stat``), which no later process of the same id shares and which
no change of the wall clock moves; and ``/use`` behind it where one process holds several things.

``is_alive`` answers None where it cannot know: another host (or container) holds it, and only its heartbeats can tell.
"""

import getpass
import os
import platform
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
START_FIELD = 22 - 3  # of what follows the command's closing parenthesis, which holds field 3 first


def this_holder(use: str = "") -> str:
    """The holder that this process is; ``use`` tells apart what it holds."""
    own = f"{platform.node()}/{_boot_id()}/{os.getpid()}/{_start_ticks(os.getpid())}"
    return f"{own}/{use}" if use else own


def is_alive(holder: str) -> bool | None:
    """Whether that process is still there; None where this machine cannot know."""
    host, boot, pid, ticks = (holder.split("/") + [""] * 4)[:4]
    if host != platform.node() or not pid.isdigit():
        return None
    return boot == _boot_id() and ticks == str(_start_ticks(int(pid)))


def process_of(holder: str) -> int | None:
    """The id of that process where it lives on this machine, else None."""
    return int(holder.split("/")[2]) if is_alive(holder) else None


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Start of a live process in clock ticks since boot, -1 when there is none (a zombie holds nothing any more)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[START_FIELD])


def this_user() -> str:
    """Whose process this is."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        return f"uid {os.getuid()}"
