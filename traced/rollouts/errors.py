"""What can go wrong around an episode. Agent mistakes are not here: they are data that the environment answers.

TracedError
└── RolloutError
    ├── SimulatorError    the user simulator broke; an environment raises it, the episode ends as infrastructure
    └── TemplateError     the chat template does not allow token-exact conversations

The one boundary at which a failure around an episode is attributed: engine, sandbox or simulator.

Invariants: whatever crosses ``attribute`` is an ``Infrastructure`` that carries the cause of end and the error's own
text, or a cancellation. The broad ``except`` is deliberate and the only one: the code behind it is an engine or an
environment, and any exception of theirs is an infrastructure outcome, never a reward of 0.

Not covered: the agent's mistakes (data), and a conversation that outgrew the context (``EndCause.MAX_TOKENS``, the
agent's own doing; ``ContextLengthError`` passes through).
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


class TemplateError(RolloutError):
    """The tokenizer's chat template cannot be continued token by token."""


class Infrastructure(Exception):
    """The machinery around an episode failed."""

    def __init__(self, cause: EndCause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


@contextmanager
def attribute(cause: EndCause, doing: str) -> Iterator[None]:
    """Attribute any exception of the block to ``cause``; ``doing`` says what was going on ("step 3")."""
    try:
        yield
    except (Infrastructure, ContextLengthError):
        raise
    except SimulatorError as error:
        raise Infrastructure(EndCause.SIMULATOR_ERROR, f"{doing}: {error}") from error
    except TimeoutError as error:
        raise Infrastructure(cause, f"{doing}: no answer in time {error}".rstrip()) from error
    except Exception as error:
        raise Infrastructure(cause, f"{doing}: {type(error).__name__}: {error}") from error
