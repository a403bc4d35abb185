"""Errors around an episode, and the one boundary where such a failure is attributed to engine, sandbox or simulator.

TracedError
└── RolloutError
    └── SimulatorError    the user simulator failed; the episode ends as infrastructure

Agent mistakes are not errors: they are data that the environment answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from store.types import EndCause
from traced.core.errors import TracedError
from traced.inference.errors import ContextLengthError


class RolloutError(TracedError):
    """A rollout failed."""


class SimulatorError(RolloutError):
    """The user simulator of an environment failed."""


class Infrastructure(Exception):
    """An infrastructure failure of an episode, with the cause of its end."""

    def __init__(self, cause: EndCause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


@contextmanager
def attribute(cause: EndCause, activity: str) -> Iterator[None]:
    """Attribute any exception of the block to ``cause``; ``activity`` describes what was going on ("step 3").

    ``ContextLengthError`` passes through: a conversation that outgrew the context is the agent's own doing.
    """
    try:
        yield
    except (Infrastructure, ContextLengthError):
        raise
    except SimulatorError as error:
        raise Infrastructure(EndCause.SIMULATOR_ERROR, f"{activity}: {error}") from error
    except TimeoutError as error:
        raise Infrastructure(cause, f"{activity}: no answer in time {error}".rstrip()) from error
    # The only broad handler: behind it run engines and environments, and any exception of theirs is an
    # infrastructure outcome, never a reward of 0.
    except Exception as error:
        raise Infrastructure(cause, f"{activity}: {type(error).__name__}: {error}") from error
