"""Errors of gates and promotion.

traced.errors.TracedError
└── GateError                the evidence cannot be compared (pairs missing, too many infrastructure outcomes)
└── PromotionError           an adapter version cannot be published, approved, rejected or rolled back
"""

from traced.errors import TracedError


class GateError(TracedError):
    """The two sets of episodes cannot be compared."""


class PromotionError(TracedError):
    """The adapter version is not in a state that allows this."""
