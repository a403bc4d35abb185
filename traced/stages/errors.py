"""What can go wrong in a stage of the cycle.

TracedError
└── StageError            the cycle stops at its last checkpoint; the same command carries on from there
    ├── CycleChanged      the cycle cannot go on: its last step is unreadable or of another version of the graph
    └── CapabilityError   one capability ends here, with this reason; the cycle goes on without it
"""

from traced.errors import TracedError


class StageError(TracedError):
    """A stage of the cycle could not do its work."""


class CycleChanged(StageError):
    """An unfinished cycle cannot be carried on by this version."""


class CapabilityError(StageError):
    """A capability came to its end before an adapter passed its gate."""
