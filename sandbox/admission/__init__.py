"""Admission: the checks that a synthetic environment must pass before any training on it.

``admit`` runs the checks; ``Thresholds`` holds their bounds. The container does not import this package.
"""

from sandbox.admission.checks import admit, refusals
from sandbox.admission.context import Thresholds
from sandbox.admission.solvability import BaseRewards

__all__ = ["BaseRewards", "Thresholds", "admit", "refusals"]
