"""Errors of scoring.

    TracedError
    └── OutcomesError
        ├── RuleFileError    the rule file has mistakes; names their lines (exit code 2)
        ├── JudgeError       the judge cannot be asked: no model, or its prompt or API key cannot be read
        └── JudgeNotTrusted  the judge's agreement with people is unknown or too low, so its verdicts do not count

A database or a judge that does not answer is not an error: the outcome stays unknown, with the reason.
"""

from traced.core.errors import TracedError


class OutcomesError(TracedError):
    """Outcomes could not be decided."""


class RuleFileError(OutcomesError):
    """The rule file has mistakes."""

    exit_code = 2


class JudgeError(OutcomesError):
    """The judge cannot be asked."""


class JudgeNotTrusted(OutcomesError):
    """The judge's verdicts do not count yet."""
