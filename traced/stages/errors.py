"""What can go wrong in a stage of the cycle.

TracedError
└── StageError            the cycle stops at its last checkpoint; the same command carries on from there
    └── CapabilityError   one capability ends here, with this reason; the cycle goes on without it
"""

from traced.errors import TracedError


class StageError(TracedError):
    """A stage of the cycle could not do its work."""


class CapabilityError(StageError):
    """A capability came to its end before an adapter passed its gate."""
