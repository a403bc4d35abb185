"""Episodes as the rollout sees them: asynchronous, many at once, wherever the environment runs.

Two implementations exist: ``traced.targets.registry`` (a target in this process, on threads) and ``sandbox.client``
(a synthetic environment in its container). A failure of the environment's own machinery raises
``sandbox.errors.SandboxError`` (or a subclass) and is an infrastructure outcome, never a reward of 0.
"""

from dataclasses import dataclass
from typing import Protocol

from sandbox.contract import Message, Score, Task


@dataclass(frozen=True)
class Step:
    """The environment's answer to one assistant message: tool and user messages, and whether the episode has ended."""

    messages: list[Message]
    done: bool


class Episode(Protocol):
    """One running task instance."""

    async def reset(self, seed: int) -> Task:
        """Begin the task instance of ``seed``."""
        ...

    async def step(self, message: Message) -> Step:
        """Send one assistant message; raises AgentFault where it is none that can be passed on."""
        ...

    async def score(self) -> Score:
        """The score as it stands."""
        ...

    async def close(self) -> None:
        """Let go of the episode."""
        ...


class EpisodeSource(Protocol):
    """Where episodes come from; ``name`` goes into each trajectory's ``source`` ("desk", "env:<hash>")."""

    @property
    def name(self) -> str:
        """What goes into each trajectory's ``source``."""
        ...

    def episode(self) -> Episode:
        """A fresh episode, not yet reset; cheap; many may be open at once."""
        ...
