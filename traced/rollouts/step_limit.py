"""The time limit of an environment's step, in episodes and in trainings."""

from typing import TYPE_CHECKING

from sandbox.goal_user import MAX_USER_TURNS
from sandbox.user import USER_ATTEMPTS

if TYPE_CHECKING:
    from traced.config.cycle_sections import UserSection

STEP_TIMEOUT_S, STEP_MARGIN_S = 30.0, 10.0


def step_timeout_s(call_seconds: float) -> float:
    """Return the seconds of an environment's step: above ``sandbox.call_seconds``, whose own limit acts first.

    The sandbox attributes the failure to the environment.
    """
    return max(STEP_TIMEOUT_S, call_seconds + STEP_MARGIN_S)


def user_wait_s(user: "UserSection") -> float:
    """Return the most seconds that a step waits for what a user says that is a model."""
    return MAX_USER_TURNS * USER_ATTEMPTS * (user.timeout_s + user.patience_s)
