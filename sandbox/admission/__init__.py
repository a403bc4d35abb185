"""Admission: the checks a synthetic environment passes before anything trains on it.

``admit`` is the way in; ``Thresholds`` are its numbers. Not imported by the container.
"""

from sandbox.admission.admit import admit, refusals
from sandbox.admission.spread import BaseRewards
from sandbox.admission.thresholds import Thresholds

__all__ = ["BaseRewards", "Thresholds", "admit", "refusals"]
