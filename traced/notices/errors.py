"""What can go wrong when a hook is told.

    TracedError
    └── NoticeError
        ├── DeliveryFailed   the hook did not take the notice (refused, silent, gone); it is tried again
        └── HookUnusable     the hook's own settings stand in the way (no such program, no such secret)

Both end in the notice's ``last_error`` and in the log, never in the caller: a dead hook blocks nothing.
"""

from traced.errors import TracedError


class NoticeError(TracedError):
    """A hook was not told."""


class DeliveryFailed(NoticeError):
    """The hook did not take the notice."""


class HookUnusable(NoticeError):
    """The hook's own settings stand in the way."""
