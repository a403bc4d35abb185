"""What can go wrong while outcomes are decided.

    TracedError
    └── OutcomesError
        ├── RuleFileError    the rule file cannot be used as it stands; names its lines (exit code 2)
        ├── JudgeError       the judge cannot be asked: no model is set, its prompt or its key cannot be read
        └── JudgeNotTrusted  the judge's agreement with people is unknown or too low, so its verdicts do not count

A database or a judge that does not answer is no error here: the outcome stays unknown, and the reason is kept.
"""

from traced.core.errors import TracedError


class OutcomesError(TracedError):
    """Outcomes could not be decided."""


class RuleFileError(OutcomesError):
    """The rule file cannot be used as it stands."""

    exit_code = 2


class JudgeError(OutcomesError):
    """The judge cannot be asked."""


class JudgeNotTrusted(OutcomesError):
    """The judge's verdicts do not count yet."""
