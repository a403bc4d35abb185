"""Errors of the sandbox: one class for each kind of failure, grouped by what caused it.

An error gets its class once, where the failure is first detected.

    SandboxError                 infrastructure failure: no verdict, never a reward of 0
    │   caused by the machine
    ├── EngineDown               no Docker engine answers, or it stopped answering
    │   ├── EngineForbidden      an engine listens, but this user may not use it
    │   └── EngineTooOld         the engine lacks features that the policy needs
    ├── ImageMissing             the sandbox image is absent or could not be built
    │   caused by the sandbox or by the environment: the message says which
    ├── WorkerDied               the container ended while it was in use (``oom`` as the engine recorded it)
    ├── EpisodeLost              infrastructure failed under an episode; only the failure's message is left
    │   caused by the environment
    ├── Deadline                 a call exceeded its deadline, in the worker or on the host
    ├── ProtocolFault            the container's output violates the protocol; the container is ended
    ├── EnvironmentFault         the untrusted code raised, or returned what the contract forbids
    │   caused by the user of the episode, who is a model
    ├── UserFault                there is none, or its message cannot be sent
    │   caused by the agent
    └── AgentFault               the message cannot be sent; the environment never received it

Every message names the cause, the value seen and, where a person can act, the command to try next. Text from the
container is sanitized and cut to ``EVIDENCE_CHARS`` before it enters a message.
"""

import os
import re

EVIDENCE_CHARS = 4000
_UNSAFE = re.compile(r"[^\n\t\x20-\x7e]")


def clipped(text: str, limit: int = EVIDENCE_CHARS) -> str:
    """Sanitize ``text`` and cut its middle where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return harmless(text)
    half = limit // 2
    return f"{harmless(text[:half])}\n... {len(text) - 2 * half} characters cut ...\n{harmless(text[-half:])}"


def harmless(text: str) -> str:
    """Escape unprintable characters (control, text direction) as ``ascii`` does: a terminal must not interpret them."""
    return _UNSAFE.sub(lambda match: match[0] if match[0].isprintable() else ascii(match[0])[1:-1], text)


class SandboxError(Exception):
    """An infrastructure failure that is no verdict on the agent's answer; ``hint`` is the next step to try."""

    def __init__(self, message: str, *, hint: str = ""):
        super().__init__(f"{message} Try {hint}." if hint else message)
        self.message = message
        self.hint = hint


class EngineDown(SandboxError):
    """No Docker engine answers; ``remedy`` is the command to try."""

    remedy = "scripts/docker-engine.sh"

    def __init__(self, cause: object):
        message = f"no Docker engine answers ({cause}). Untrusted environments run nowhere else."
        script = f"{self.remedy} (as root on Debian it installs and starts one)"
        # While DOCKER_HOST is set, an engine that is started at another address is not used.
        if configured_host := os.environ.get("DOCKER_HOST"):
            self.remedy = "unset DOCKER_HOST"
            message += f" DOCKER_HOST is {clipped(configured_host, 200)}: start the engine there, or use another."
            super().__init__(message, hint=f"'{self.remedy}', then {script}")
        else:
            super().__init__(message, hint=f"{script}, or set DOCKER_HOST")


class EngineForbidden(EngineDown):
    """A Docker engine listens, but this user may not use it."""

    remedy = 'sudo usermod --append --groups docker "$USER"'

    def __init__(self, host: str):
        SandboxError.__init__(
            self,
            f"the Docker engine at {host} refuses this user (permission denied).",
            hint=f"'{self.remedy}' and log in again, or run as a user who may",
        )


class EngineTooOld(EngineDown):
    """The Docker engine answers, but its API is older than the policy needs."""

    remedy = "sudo apt-get install --only-upgrade docker.io"

    def __init__(self, version: str, required: str):
        SandboxError.__init__(
            self,
            f"the Docker engine speaks API {version}; the sandbox's policy needs {required} (Docker 19.03) or newer.",
            hint=f"'{self.remedy}' (on Debian) and start it again, or set DOCKER_HOST to a newer engine",
        )


class ImageMissing(SandboxError):
    """The sandbox image is not on this machine."""

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
        cause = (
            "it ran out of memory"
            if oom
            else f"exit code {exit_code}"
            if exit_code is not None
            else "the host ended it"
        )
        tail = f"; last words: {clipped(stderr)}" if stderr else ""
        super().__init__(f"the sandbox's worker ended: {cause}{tail}")


class EpisodeLost(SandboxError):
    """Infrastructure failed under an episode, inside the container or outside; only the failure's message is left."""


class Deadline(SandboxError):
    """A call exceeded its deadline."""

    def __init__(self, op: str, seconds: float, stopped_by: str):
        self.op = op
        # "worker": the worker interrupted the call, its episode is lost; "host": the host killed the container.
        self.stopped_by = stopped_by
        super().__init__(f"environment call '{op}' outlived its {seconds:g} s (stopped by the {stopped_by})")


class ProtocolFault(SandboxError):
    """The container's output violates the protocol."""


class UserFault(SandboxError):
    """The environment asks for a user that is a model, and there is none, or its message cannot be sent."""


class AgentFault(SandboxError):
    """The agent's message cannot be sent; the environment never received it."""


class EnvironmentFault(SandboxError):
    """The untrusted code raised, or returned what the contract forbids."""

    def __init__(self, op: str, error: str, traceback: str = ""):
        self.op = op
        self.error = clipped(error, 500)
        self.traceback = clipped(traceback)
        super().__init__(f"environment failed in '{op}': {self.error}")
