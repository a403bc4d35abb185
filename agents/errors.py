"""What can go wrong in analysis and synthesis, attributed once.

    AgentsError
    ├── TranscriptError    a recorded message list is not a conversation
    ├── LabelTableError    a labelling table is incomplete, doubled, or speaks of unknown trajectories
    ├── SynthesisError     no environment can be written for a capability from the given trajectories
    └── ModelError         a language model was asked in vain
        ├── ModelUnavailable   it did not answer for longer than allowed: no connection, 5xx, silence, 429
        ├── ModelRefused       asking again makes no sense: a question that is too long, a bad request
        │   └── ModelDenied    nor does asking anything else: no key, no permission, no money, no such model
        ├── OutOfForm          it answered, but never in the form that was asked for, repairs included
        └── BudgetSpent        the tokens, the money or the minutes that were allowed are used up

A malformed tool call made by the agent is none of these: it is data, and a detector's business.
"""

from typing import Self


class AgentsError(Exception):
    """Analysis or synthesis could not be carried out; ``hint`` says what to try, where there is something."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def within(self, what: str, *, hint: str) -> Self:
        """The same error as it concerns ``what``: of its kind, which says whose failure it is."""
        return type(self)(f"{what}: {self.message}", hint=hint)

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class TranscriptError(AgentsError):
    """A trajectory's messages cannot be read as a conversation."""


class LabelTableError(AgentsError):
    """A labelling table breaks the rule that each (trajectory, capability, run) cell is filled exactly once."""


class SynthesisError(AgentsError):
    """No environment can be written for a capability from the trajectories that were given."""


class ModelError(AgentsError):
    """A language model was asked in vain."""


class ModelUnavailable(ModelError):
    """The model's server did not answer for longer than is allowed."""


class ModelRefused(ModelError):
    """The model's server will not answer this, however often it is asked."""


class ModelDenied(ModelRefused):
    """The model's server will answer nothing that is asked this way: the key, the account, the model or the address."""


class OutOfForm(ModelError):
    """The model answered, but never in the form that it was asked for."""


class BudgetSpent(ModelError):
    """The tokens, the money or the minutes that were allowed are used up."""
