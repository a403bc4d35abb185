"""How much memory there is for this process: the machine's, or its control group's where that has less.

Source: the kernel's cgroup-v2 documentation (``memory.max`` of the group and of all above it); a container sees its own
group as the root. Not covered: cgroup v1, swap.
"""

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def memory_bytes() -> int:
    """Bytes that this process and what it starts may use before the kernel ends something."""
    return min([psutil.virtual_memory().total, *_limits()])


def _limits() -> list[int]:
    try:
        own = next((line[3:] for line in OWN.read_text().splitlines() if line.startswith("0::")), "/")
    except OSError:
        return []
    group = CGROUPS / own.strip("/")
    found = []
    for folder in [group, *group.parents]:
        if not folder.is_relative_to(CGROUPS):
            break
        try:
            text = (folder / "memory.max").read_text().strip()
        except OSError:  # the root has none
            continue
        if text.isdigit():  # "max" is no limit
            found.append(int(text))
    return found
