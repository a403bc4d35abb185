"""When a child has to be ended: pure arithmetic on a monotonic clock that is passed in (seconds).

Invariants: silence and lack of progress are measured from the last sign of life that was *seen*; time in which the
watcher itself did not run (a stopped or starved service, whose pipe still holds the child's heartbeats) is not held
against the child. The same phase and counter again is no progress.
Not covered: memory between two samples; a hard ceiling is the business of a cgroup.
"""

from dataclasses import dataclass, field

from traced.executor.job import Ended, Limits

MIB = 2**20


@dataclass
class Watchdog:
    """One child's clock; ``check_s`` is how often ``verdict`` is asked."""

    limits: Limits
    check_s: float
    started: float
    heard: float = field(init=False)
    advanced: float = field(init=False)
    asked: float = field(init=False)
    mark: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        self.heard = self.advanced = self.asked = self.started

    def beat(self, at: float) -> None:
        """The child told something."""
        self.heard = at

    def progress(self, at: float, phase: str, done: int) -> None:
        """The child told how far it is."""
        self.heard = at
        if (phase, done) != self.mark:
            self.mark = (phase, done)
            self.advanced = at

    def verdict(self, at: float, memory_bytes: int) -> tuple[Ended, str] | None:
        """How the child has to be ended now, and why in words; None while it may go on."""
        self._forgive(at)
        limits = self.limits
        if limits.memory_bytes is not None and memory_bytes > limits.memory_bytes:
            what = f"{memory_bytes / MIB:.0f} MiB in all its processes, over the ceiling of"
            return Ended.OUT_OF_MEMORY, f"{what} {limits.memory_bytes / MIB:.0f} MiB"
        if at - self.heard > limits.heartbeat_s:
            return Ended.HUNG, f"no heartbeat for {at - self.heard:.1f} s (limit {limits.heartbeat_s:g} s)"
        if limits.progress_s is not None and at - self.advanced > limits.progress_s:
            told = f"{self.mark[0]!r} {self.mark[1]}" if self.mark else "none at all"
            return Ended.STALLED, f"no progress for {at - self.advanced:.1f} s (limit {limits.progress_s:g} s): {told}"
        return None

    def _forgive(self, at: float) -> None:
        """Move the marks on by the time in which nobody asked; a pause too short to pass for a hang is none."""
        lost = at - self.asked - max(2 * self.check_s, self.limits.heartbeat_s / 4)
        self.asked = at
        if lost > 0:
            self.heard = min(self.heard + lost, at)
            self.advanced = min(self.advanced + lost, at)
