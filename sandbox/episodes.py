"""Define the asynchronous interface of episodes that rollouts use, wherever the environment runs.

Implemented by ``traced.targets.registry`` (a target in this process, on threads) and ``sandbox.client`` (a synthetic
environment in its container). An infrastructure failure raises ``sandbox.errors.SandboxError``; it is never a reward of
0.
"""

from dataclasses import dataclass
from typing import Protocol

from sandbox.contract import Message, Score, Task


@dataclass(frozen=True)
class Step:
    """The response to one assistant message: tool and user messages, and whether the episode has ended."""

    messages: list[Message]
    done: bool


class Episode(Protocol):
    """One running task instance."""

    async def reset(self, seed: int) -> Task:
        """Start the task instance of ``seed`` and return its task."""
        ...

    async def step(self, message: Message) -> Step:
        """Send one assistant message and return the replies; raises AgentFault if it cannot be sent."""
        ...

    async def score(self) -> Score:
        """Return the current score."""
        ...

    async def close(self) -> None:
        """Release the episode's resources."""
        ...


class EpisodeSource(Protocol):
    """A target or synthetic environment that creates episodes."""

    @property
    def name(self) -> str:
        """The name of the source, stored as ``Trajectory.source``: "desk", "env:<hash>"."""
        ...

    @property
    def concurrency(self) -> int | None:
        """How many of its episodes may be open at once; None for any number."""
        ...

    def episode(self, trial: int = 0) -> Episode:
        """Return a new episode, not yet reset; cheap, and many may be open at once.

        Args:
            trial: Which repetition of its task it is. A user that is a model speaks otherwise in another trial.
        """
        ...
