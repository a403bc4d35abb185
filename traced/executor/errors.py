"""What can go wrong around a job.

TracedError
└── ExecutorError
    ├── StartError    the child could not be started at all: nothing is known about its input
    ├── JobFileError  (in the child) the job file cannot be read
    ├── Yielded       the job gave way when it was asked to; nothing failed, and it goes on later
    └── Parked        the input failed too often and waits for a person; the cycle goes on without it

What goes wrong inside a job is no exception here: it is a ``Result`` with its evidence (``traced.executor.job``).
"""

from traced.errors import TracedError


class ExecutorError(TracedError):
    """A job could not be run."""


class StartError(ExecutorError):
    """The child process could not be started."""


class JobFileError(ExecutorError):
    """The job file cannot be read."""


class Yielded(ExecutorError):
    """The job gave way when it was asked to."""


class Parked(ExecutorError):
    """The input failed too often; it is left aside until a person releases it."""
