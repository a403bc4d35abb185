"""The whole posture of a sandbox container, in one readable place.

What it holds back: the network (none, nor the names of the host's), the host's files (no mount, read-only root),
privileges (no capability, no gain of any, an unprivileged user, Docker's default seccomp filter), the host's memory and
swap, processors, process table and log space, shared memory, message queues and IPC. What it leaves: a small /tmp that
cannot be executed from, and stdio.

Known, and left open because the engine offers nothing against it:

    a program from memory   memfd_create(2) and exec; vm.memfd_noexec is no sysctl that runc lets a container have. It
                            runs under this same policy, and gets no further than the interpreter.
    ptrace inside           among the container's own processes, which are all of one user and one environment; the
                            default seccomp filter permits it, and the host's processes have no number here.
    /proc/PID/mountinfo     names the engine's folders for this container's layers and for /etc/hosts and the like, and
                            the container's id: no secret, and nothing there can be opened. A masked path covers the
                            first process alone, for every process has a file of its own.
    System V IPC            in a namespace of its own; what it holds counts as the container's memory.
    AF_VSOCK                has no namespace in Linux, so that having no network does not cover it: in a virtual machine
                            what its hypervisor listens on there is within reach. The default seccomp filter refuses
                            such sockets since Docker 23.0 (moby 44562; of the 20.10 series 20.10.22 alone did), yet not
                            to a 32-bit program's socketcall(2). ``traced doctor`` tells an engine that is older.
    /proc                   tells the kernel's version and command line, the boot's id, block devices and the load: what
                            the engine masks is hidden, these are not.

Where the engine has gVisor (a runtime named runsc), the container runs on its kernel instead of the host's.

Invariants: every option here is asserted on a running container by ``tests/integration/sandbox/test_posture.py``;
no caller adds options; limits come from ``SandboxLimits`` alone and are bounded.
Not covered: bugs in the kernel or in runc (install gVisor, or run the engine in a virtual machine, if that matters),
and side channels.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from docker.types import LogConfig, Ulimit

USER = "65534:65534"
LABEL = "traced.sandbox"
LABEL_OWNER = "traced.owner"
LABEL_PROCESS = "traced.process"
LABEL_ENVIRONMENT = "traced.environment"
MIB = 1024 * 1024
GVISOR = "runsc"
# An environment can observe its interpreter's hash seed, so admission must use the value of training.
TRAINING_HASH_SEED = 0
# Files and folders in /tmp: the size alone does not bound their number.
INODES = 4096
BOUNDS: dict[str, tuple[float, float]] = {
    "memory_mb": (32, 16384),
    "cpus": (0.1, 64),
    "pids": (4, 1024),
    "tmp_mb": (1, 1024),
    "open_files": (16, 4096),
    "message_kb": (16, 65536),
    "call_seconds": (0.05, 600),
    "start_seconds": (1, 600),
    "episodes": (1, 65536),
    "restarts": (0, 1000),
}


@dataclass(frozen=True)
class SandboxLimits:
    """What one container may use: sizes in MiB, times in seconds; values out of ``BOUNDS`` raise ValueError."""

    memory_mb: int = 256
    cpus: float = 1.0
    pids: int = 32
    tmp_mb: int = 16
    open_files: int = 64
    # One line of the protocol in either direction, and all responses of one episode.
    message_kb: int = 1024
    # For reset, step or score of one episode.
    call_seconds: float = 5.0
    # From the started container to the worker's first response.
    start_seconds: float = 60.0
    # Open at once.
    episodes: int = 4096
    # New containers per source after one that died.
    restarts: int = 3

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"sandbox limit {name} is {value}; it must lie within {low} and {high}")


def runtime(available: Collection[str]) -> str | None:
    """The stricter of the engine's runtimes if it has one; None for the engine's default."""
    return GVISOR if GVISOR in available else None


def container_options(
    limits: SandboxLimits, *, hash_seed: int = TRAINING_HASH_SEED, runtime: str | None = None
) -> dict[str, Any]:
    """Keyword arguments of docker's ``containers.create``, the same for every sandbox except for the limits."""
    memory = limits.memory_mb * MIB
    return {
        "runtime": runtime,
        "network_mode": "none",
        # Nobody listens there; without an entry the engine would copy the host's name servers and search domains.
        "dns": ["127.0.0.1"],
        "dns_search": ["."],
        "dns_opt": ["attempts:1"],
        "read_only": True,
        "user": USER,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "privileged": False,
        "ipc_mode": "none",
        "init": True,
        "pids_limit": limits.pids,
        "mem_limit": memory,
        # Equal to the memory limit: no swap.
        "memswap_limit": memory,
        "nano_cpus": int(limits.cpus * 1_000_000_000),
        "ulimits": [
            Ulimit(name="core", soft=0, hard=0),
            # The engine mounts /dev/mqueue in every container.
            Ulimit(name="msgqueue", soft=0, hard=0),
            Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
        ],
        "tmpfs": {"/tmp": f"rw,nosuid,nodev,noexec,mode=1777,size={limits.tmp_mb}m,nr_inodes={INODES}"},
        "log_config": LogConfig(type="none"),
        "hostname": "sandbox",
        "working_dir": "/tmp",
        "environment": {"PYTHONHASHSEED": str(hash_seed)},
        "stdin_open": True,
        "tty": False,
    }
