"""Errors of a target and of the user in its episodes. Both are infrastructure failures, never the agent's.

TracedError
├── TargetFault       the target raised, did not answer in time, ended, or returned what the contract forbids
└── SimulatorError    the user of the episode failed
"""

from traced.core.errors import TracedError


class TargetFault(TracedError):
    """The target raised, did not answer in time, ended, or returned what the contract forbids."""


class SimulatorError(TracedError):
    """The user of an episode failed, who is a simulator."""
