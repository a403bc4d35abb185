"""Admission: the checks a synthetic environment passes before anything trains on it.

``admit`` is the way in; ``Thresholds`` are its numbers. Not imported by the container.
"""

from sandbox.admission.checks import admit, refusals
from sandbox.admission.context import Thresholds
from sandbox.admission.solvability import BaseRewards

__all__ = ["BaseRewards", "Thresholds", "admit", "refusals"]
