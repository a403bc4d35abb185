"""Errors around an episode, and the one boundary where such a failure is attributed to engine, sandbox or simulator.

Agent mistakes are not errors: they are data that the environment answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from sandbox.errors import UserFault
from traced.inference.errors import ContextLengthError
from traced.targets.errors import ConversationTooLong, SimulatorError, TargetFault, UserUnavailable


class Fault(StrEnum):
    """The part of the infrastructure that failed; the values are those of ``store.types.EndCause``."""

    ENGINE = "engine_error"
    SANDBOX = "sandbox_error"
    TARGET = "target_error"
    SIMULATOR = "simulator_error"


class Infrastructure(Exception):
    """An infrastructure failure of an episode, attributed to one part."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault
        self.detail = detail


@contextmanager
def attribute(fault: Fault, activity: str) -> Iterator[None]:
    """Attribute any exception of the block to ``fault``; ``activity`` describes what was going on ("step 3").

    These pass through: ``ContextLengthError`` and ``ConversationTooLong``, because a conversation that outgrew a
    context is the agent's own doing, and ``UserUnavailable``, which would end every other episode as well.
    """
    try:
        yield
    except (Infrastructure, ContextLengthError, ConversationTooLong, UserUnavailable):
        raise
    except (SimulatorError, UserFault) as error:
        raise Infrastructure(Fault.SIMULATOR, f"{activity}: {error}") from error
    except TargetFault as error:
        raise Infrastructure(Fault.TARGET, f"{activity}: {error}") from error
    except TimeoutError as error:
        raise Infrastructure(fault, f"{activity}: no answer in time {error}".rstrip()) from error
    # The only broad handler: behind it run engines and environments, and any exception of theirs is an
    # infrastructure outcome, never a reward of 0.
    except Exception as error:
        raise Infrastructure(fault, f"{activity}: {type(error).__name__}: {error}") from error
