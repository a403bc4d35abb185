"""Errors of a target and of the user in its episodes. Both are infrastructure failures, never the agent's.

TracedError
├── TargetFault       the target raised, did not answer in time, ended, or returned what the contract forbids
├── SimulatorError    the user of the episode failed
├── ConversationTooLong    the conversation does not fit the context of the user's model: it ends there
└── UserUnavailable   the model that is the user cannot be asked at all: the stage ends, and the cycle waits
"""

from traced.core.errors import TracedError


class TargetFault(TracedError):
    """The target raised, did not answer in time, ended, or returned what the contract forbids."""


class SimulatorError(TracedError):
    """The user of an episode failed, who is a simulator."""


class ConversationTooLong(TracedError):
    """The conversation has outgrown the context of the user's model."""


class UserUnavailable(TracedError):
    """The model that speaks as the user cannot be asked: no server, a wrong key, or no setting."""
