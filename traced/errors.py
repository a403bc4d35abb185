"""The root of every error that traced raises on purpose.

    TracedError                 exit code 1; ``hint`` names the next command to try
    └── one errors.py per package derives its own tree from here

An error's text says the cause and the value seen; ``str(error)`` appends the hint, so that a log line is enough to act
on. Not covered: programming mistakes, which stay ordinary exceptions with their traceback.
"""


class TracedError(Exception):
    """Something that a person can act on went wrong."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class ConfigError(TracedError):
    """The configuration cannot be used as it stands: an unknown key, a bad value, an unreadable file."""

    exit_code = 2


class DiskError(TracedError):
    """A file could not be written; nothing half-written is left behind."""
