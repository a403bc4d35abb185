"""Errors of analysis and synthesis.

    AgentsError
    ├── TranscriptError    recorded messages do not form a conversation
    ├── LabelTableError    a label table is incomplete, has duplicates, or names unknown trajectories
    ├── SynthesisError     no environment can be written for a capability from these trajectories
    └── ModelError         no usable answer from a language model
        ├── ModelUnavailable   no answer within ``patience_s``: no connection, 5xx, silence, 429
        ├── ModelRefused       the server rejects this request: too long, malformed
        │   └── ModelDenied    the server rejects every request: key, permission, credit, unknown model
        ├── OutOfForm          no answer matched the requested schema, repairs included
        └── BudgetSpent        the allowed tokens, money or minutes are used up

A malformed tool call of the recorded agent is data, not an error.
"""

from typing import Self


class AgentsError(Exception):
    """Analysis or synthesis failed; ``hint`` names the next thing to try, if there is one."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def with_context(self, subject: str, *, hint: str) -> Self:
        """Return an error of the same class whose message starts with ``subject`` and whose hint is ``hint``."""
        return type(self)(f"{subject}: {self.message}", hint=hint)

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class TranscriptError(AgentsError):
    """A trajectory's messages cannot be read as a conversation."""


class LabelTableError(AgentsError):
    """A label table does not have exactly one cell per trajectory, capability and run."""


class SynthesisError(AgentsError):
    """No environment can be written for a capability from the given trajectories."""


class ModelError(AgentsError):
    """A language model gave no usable answer."""


class ModelUnavailable(ModelError):
    """The model's server did not answer within the allowed time."""


class ModelRefused(ModelError):
    """The model's server rejects this request, and a retry would not help."""


class ModelDenied(ModelRefused):
    """The model's server rejects every request: the key, the account, the model or the address is wrong."""


class OutOfForm(ModelError):
    """The model answered, but no answer was usable: not in the requested schema, refused or cut off."""


class BudgetSpent(ModelError):
    """The allowed tokens, money or minutes are used up."""
