"""The executor and its rules as the settings of a data directory ask for them."""

from traced.config import Settings
from traced.executor.job import Limits
from traced.executor.local import LocalExecutor
from traced.executor.retry import Backoff
from traced.host.memory import memory_bytes

MIB = 2**20
SHARE = 0.9  # of the memory that there is: before the kernel ends something, which might be the service


def executor(settings: Settings) -> LocalExecutor:
    """Jobs as child processes; their logs lie in ``logs/CYCLE/`` of the data directory."""
    return LocalExecutor(settings.data_dir / "logs", log_bytes=settings.executor.log_mb * MIB)


def limits(settings: Settings) -> Limits:
    """When a child is ended."""
    section = settings.executor
    memory = section.memory_mb * MIB or int(SHARE * memory_bytes())
    return Limits(section.heartbeat_s, section.progress_s or None, memory, section.grace_s)


def backoff(settings: Settings) -> Backoff:
    """How long to wait before the next attempt."""
    section = settings.executor
    return Backoff(section.backoff_s, section.backoff_factor, section.backoff_cap_s)
