"""What can go wrong around untrusted code, each failure attributed once, at the border where it is first seen.

    SandboxError                 an infrastructure outcome for whoever runs episodes; never a reward of 0
    ├── EngineDown               no Docker engine answers, or it stopped answering
    ├── ImageMissing             the sandbox image is not there or could not be built
    ├── WorkerDied               the container ended while it was in use (``oom`` as the engine recorded it)
    ├── Deadline                 a call outlived its deadline, inside the worker or, where that failed, on the host
    ├── EpisodeLost              an episode ended by the machinery's failure, which was told in words alone
    ├── ProtocolFault            what came out of the container is not the protocol; the container is ended
    └── EnvironmentFault         the untrusted code raised, or answered with something the contract forbids

Every message says the cause, the value seen and, where a person can act, the command to try next. Text that comes
from the container is cut to ``EVIDENCE_CHARS`` before it enters a message.
"""

EVIDENCE_CHARS = 4000


def clipped(text: str, limit: int = EVIDENCE_CHARS) -> str:
    """``text``, or its first and last halves around a mark when it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


class SandboxError(Exception):
    """The sandbox failed; nothing is known about the agent's answer."""


class EngineDown(SandboxError):
    """No Docker engine answers."""

    def __init__(self, cause: object):
        super().__init__(
            f"no Docker engine answers ({cause}). Untrusted environments run nowhere else. "
            "Try scripts/docker-engine.sh (as root on Debian it installs and starts one), or set DOCKER_HOST."
        )


class ImageMissing(SandboxError):
    """The sandbox image is not there."""

    def __init__(self, tag: str, cause: object = "the engine does not know it"):
        super().__init__(
            f"sandbox image {tag} is missing ({cause}). "
            "Try 'traced sandbox image', or 'traced sandbox image --from-host' where no registry can be reached."
        )


class WorkerDied(SandboxError):
    """The container ended while it was in use."""

    def __init__(self, exit_code: int | None, oom: bool, stderr: str = ""):
        self.exit_code = exit_code
        self.oom = oom
        why = (
            "it ran out of memory"
            if oom
            else f"exit code {exit_code}"
            if exit_code is not None
            else "the host ended it"
        )
        tail = f"; last words: {clipped(stderr)}" if stderr else ""
        super().__init__(f"the sandbox's worker ended: {why}{tail}")


class EpisodeLost(SandboxError):
    """The machinery under an episode failed, inside the container or outside: only its words are left."""


class Deadline(SandboxError):
    """A call outlived its deadline."""

    def __init__(self, op: str, seconds: float, where: str):
        self.op = op
        self.where = where  # "worker": the episode is lost; "host": the container was killed
        super().__init__(f"environment call '{op}' outlived its {seconds:g} s (stopped by the {where})")


class ProtocolFault(SandboxError):
    """What came out of the container is not the protocol."""


class EnvironmentFault(SandboxError):
    """The untrusted code raised, or answered with something the contract forbids."""

    def __init__(self, op: str, error: str, traceback: str = ""):
        self.op = op
        self.error = clipped(error, 500)
        self.traceback = clipped(traceback)
        super().__init__(f"environment failed in '{op}': {self.error}")
