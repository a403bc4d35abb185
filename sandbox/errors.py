"""What can go wrong around untrusted code, each failure attributed once, at the border where it is first seen.

    SandboxError                 an infrastructure outcome for whoever runs episodes; never a reward of 0
    │   the machine's
    ├── EngineDown               no Docker engine answers, or it stopped answering
    │   ├── EngineForbidden      it is there, but not for this user
    │   └── EngineTooOld         it answers, but knows too little of the policy
    ├── ImageMissing             the sandbox image is not there or could not be built
    │   the sandbox's, or the environment's: its words say which
    ├── WorkerDied               the container ended while it was in use (``oom`` as the engine recorded it)
    ├── EpisodeLost              an episode ended by the machinery's failure, which was told in words alone
    │   the environment's
    ├── Deadline                 a call outlived its deadline, inside the worker or, where that failed, on the host
    ├── ProtocolFault            what came out of the container is not the protocol; the container is ended
    ├── EnvironmentFault         the untrusted code raised, or answered with something the contract forbids
    │   the agent's
    └── AgentFault               its message is none that could be passed on; the environment never saw it

Every message says the cause, the value seen and, where a person can act, the command to try next. Text that comes
from the container is cut to ``EVIDENCE_CHARS`` and made harmless for a terminal before it enters a message.
"""

import os
import re

EVIDENCE_CHARS = 4000
_SUSPECT = re.compile(r"[^\n\t\x20-\x7e]")


def clipped(text: str, limit: int = EVIDENCE_CHARS) -> str:
    """``text`` made harmless; only its first and last halves around a mark where it is longer than ``limit``."""
    if len(text) <= limit:
        return harmless(text)
    half = limit // 2
    return f"{harmless(text[:half])}\n... {len(text) - 2 * half} characters cut ...\n{harmless(text[-half:])}"


def harmless(text: str) -> str:
    """What a terminal would obey (control characters, marks that turn text) or not show, as Python would escape it."""
    return _SUSPECT.sub(lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)


class SandboxError(Exception):
    """The sandbox failed; nothing is known about the agent's answer. ``hint``: what to try next, where that helps."""

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(f"{message} Try {hint}." if hint else message)
        self.message = message
        self.hint = hint


class EngineDown(SandboxError):
    """No Docker engine answers. ``remedy`` is the command to try: a DOCKER_HOST that leads nowhere hides any other."""

    remedy = "scripts/docker-engine.sh"

    def __init__(self, cause: object):
        message = f"no Docker engine answers ({cause}). Untrusted environments run nowhere else."
        script = f"{self.remedy} (as root on Debian it installs and starts one)"
        if named := os.environ.get("DOCKER_HOST"):
            self.remedy = "unset DOCKER_HOST"
            message += f" DOCKER_HOST is {clipped(named, 200)}: start the engine there, or use another."
            super().__init__(message, hint=f"'{self.remedy}', then {script}")
        else:
            super().__init__(message, hint=f"{script}, or set DOCKER_HOST")


class EngineForbidden(EngineDown):
    """A Docker engine listens, but this user may not speak to it."""

    remedy = 'sudo usermod --append --groups docker "$USER"'

    def __init__(self, host: str):
        SandboxError.__init__(
            self,
            f"the Docker engine at {host} refuses this user (permission denied).",
            hint=f"'{self.remedy}' and log in again, or run as a user who may",
        )


class EngineTooOld(EngineDown):
    """A Docker engine answers, but knows too little of the policy."""

    remedy = "sudo apt-get install --only-upgrade docker.io"

    def __init__(self, found: str, needed: str):
        SandboxError.__init__(
            self,
            f"the Docker engine speaks API {found}; the sandbox's policy needs {needed} (Docker 19.03) or newer.",
            hint=f"'{self.remedy}' (on Debian) and start it again, or set DOCKER_HOST to a newer engine",
        )


class ImageMissing(SandboxError):
    """The sandbox image is not there."""

    def __init__(self, tag: str, cause: object = "the engine does not know it"):
        super().__init__(
            f"sandbox image {tag} is missing ({cause}).",
            hint="'traced sandbox image', or 'traced sandbox image --from-host' where no registry can be reached",
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


class AgentFault(SandboxError):
    """The agent's message is none that could be passed on; the environment never saw it."""


class EnvironmentFault(SandboxError):
    """The untrusted code raised, or answered with something the contract forbids."""

    def __init__(self, op: str, error: str, traceback: str = ""):
        self.op = op
        self.error = clipped(error, 500)
        self.traceback = clipped(traceback)
        super().__init__(f"environment failed in '{op}': {self.error}")
