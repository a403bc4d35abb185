"""A flag that a signal handler may set.

``threading.Event`` may not be used for that: its lock is not re-entrant, so a signal that arrives while the main thread
holds it, in ``wait`` or in the handler of the signal before, stops the process for ever.
"""

import time


class StopFlag:
    """Set once, by a signal handler or a thread; read by the main thread."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, *_: object) -> None:
        """Set the flag; the arguments are those of a signal handler."""
        self.is_set = True

    def wait(self, seconds: float) -> bool:
        """Sleep, and return whether the flag is set; a signal does not end the sleep."""
        if not self.is_set:
            time.sleep(seconds)
        return self.is_set
