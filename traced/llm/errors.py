"""What can go wrong before a language model is asked.

    TracedError
    └── LlmError    no model is set, or its key cannot be read

What goes wrong when it is asked is ``agents.errors.ModelError``.
"""

from traced.errors import TracedError


class LlmError(TracedError):
    """The language model cannot be asked."""
