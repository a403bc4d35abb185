"""Define the security policy of a sandbox container: every option with which it is created.

The policy denies the network (there is none, and the host's name servers are hidden), the host's files (no mount,
read-only root), privileges (no capability and no way to gain one, an unprivileged user, Docker's default seccomp
filter), and the host's shared memory, message queues and IPC. It limits memory, processors, processes and open files,
and allows no swap and no log. It leaves a small /tmp, from which nothing can be executed, and stdio.

Known gaps, which the engine has no option to close:

    execution from memory   memfd_create(2) and exec: runc does not let a container set the sysctl vm.memfd_noexec. Such
                            a program runs under this same policy and can do no more than the interpreter.
    ptrace inside           Between the container's processes, which all belong to one user and one environment; the
                            default seccomp filter permits it. The host's processes have no id in the container.
    /proc/PID/mountinfo     Names the engine's folders for this container's layers and for files like /etc/hosts, and
                            the container's id. None of it is secret, and none of these paths can be opened. Masking the
                            path would cover the first process alone, because every process has its own file.
    System V IPC            Works in the container's own namespace; its data counts as the container's memory.
    AF_VSOCK                Linux has no namespace for it, so having no network does not cover it: in a virtual machine,
                            services of the hypervisor that listen on it can be reached. The default seccomp filter
                            refuses such sockets since Docker 23.0 (moby 44562; in the 20.10 series only 20.10.22 did),
                            but not a 32-bit program's socketcall(2). ``traced doctor`` reports an older engine.
    /proc                   Reveals the kernel's version and command line, the boot id, block devices and the load; the
                            paths that the engine masks are hidden.

If the engine has gVisor (a runtime named runsc), the container runs on gVisor's kernel instead of the host's.

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
# Limit of files and folders in /tmp, whose size alone does not bound their number.
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
    """The limits of one container: sizes in MiB or KiB, times in seconds; values out of ``BOUNDS`` raise ValueError."""

    memory_mb: int = 256
    cpus: float = 1.0
    pids: int = 32
    tmp_mb: int = 16
    open_files: int = 64
    # Limit of one line of the protocol in either direction, and of all responses of one episode together.
    message_kb: int = 1024
    # Limit of one call of reset, step or score.
    call_seconds: float = 5.0
    # From the started container to the worker's first response.
    start_seconds: float = 60.0
    # Episodes that may be open at once.
    episodes: int = 4096
    # New containers per source that may replace failed ones.
    restarts: int = 3

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"sandbox limit {name} is {value}; it must lie within {low} and {high}")


def runtime(available: Collection[str]) -> str | None:
    """Return gVisor's runtime if it is in ``available``; None stands for the engine's default runtime."""
    return GVISOR if GVISOR in available else None


def container_options(
    limits: SandboxLimits, *, hash_seed: int = TRAINING_HASH_SEED, runtime: str | None = None
) -> dict[str, Any]:
    """Return keyword arguments for docker's ``containers.create``; only limits, hash seed and runtime vary."""
    memory = limits.memory_mb * MIB
    return {
        "runtime": runtime,
        "network_mode": "none",
        # No server listens there. Without an entry, the engine would copy the host's name servers and search domains.
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
