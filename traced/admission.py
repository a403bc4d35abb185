"""What the settings say of an admission, in a cycle and of a single file alike."""

from sandbox.admission import Thresholds
from traced.config import Settings


def thresholds(settings: Settings) -> Thresholds:
    """The settings' thresholds; the others keep their defaults."""
    given = settings.admission
    return Thresholds(
        seeds=given.seeds,
        spread_groups=given.base_seeds,
        spread_rollouts=given.base_rollouts,
        spread_low=given.mean_low,
        spread_high=given.mean_high,
        spread_mixed=given.mixed,
    )
