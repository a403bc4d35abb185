"""The time limit of an environment's step, in episodes and in trainings."""

STEP_TIMEOUT_S, STEP_MARGIN_S = 30.0, 10.0


def step_timeout_s(call_seconds: float) -> float:
    """Return the seconds of an environment's step: above ``sandbox.call_seconds``, whose own limit acts first.

    The sandbox attributes the failure to the environment.
    """
    return max(STEP_TIMEOUT_S, call_seconds + STEP_MARGIN_S)
