"""The bundled target: a shop's service desk with ten tools, a policy that varies by seed and a scripted user."""

from traced.targets.desk.capabilities import CAPABILITIES, needed_capabilities
from traced.targets.desk.environment import SPLITS, Desk, demonstrate
from traced.targets.desk.tools import TOOLS

__all__ = ["CAPABILITIES", "SPLITS", "TOOLS", "Desk", "demonstrate", "needed_capabilities"]
