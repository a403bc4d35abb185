"""The settings of the executor: ``[executor]``."""

from pydantic import Field

from traced.section import Positive, Section


class ExecutorSection(Section):
    """Stages as child processes: when one is ended, when it is tried again, when its input is parked."""

    heartbeat_s: float = Field(default=120.0, gt=0, description="seconds of silence after which a child counts as hung")
    progress_s: float = Field(
        default=3600.0, ge=0, description="seconds without progress after which a child counts as stuck; 0 is no limit"
    )
    memory_mb: int = Field(
        default=0, ge=0, description="memory of a child and what it starts, MiB; 0 is nine tenths of what there is"
    )
    grace_s: float = Field(default=15.0, gt=0, description="seconds for an orderly stop before a child is killed")
    log_mb: Positive = Field(default=20, description="log of one stage, MiB; older lines are dropped")
    failures: Positive = Field(default=3, description="failures on the same input after which it is parked")
    backoff_s: float = Field(default=5.0, gt=0, description="seconds before the second attempt")
    backoff_factor: float = Field(default=2.0, ge=1, description="growth of that with every attempt that fails")
    backoff_cap_s: float = Field(default=900.0, gt=0, description="longest wait between two attempts, seconds")
