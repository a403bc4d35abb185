"""The exploit panel: each module here is one adversary, an agent that wants reward without the work.

Invariants: a module's docstring says which shortcut it tries; its ``act`` is a ``policies.Policy``, a pure function of
what an agent sees, the turn's number and a seeded generator, so that an episode can be played again; it ends in words.
To add one, add a file. Not covered: adversaries that read the environment's source, and models.
"""

import importlib
import pkgutil

from sandbox.admission.policies import Policy


def panel() -> dict[str, Policy]:
    """Every adversary of this package by its module's name; raises TypeError for a module that is none."""
    found: dict[str, Policy] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        adversary = importlib.import_module(f"{__name__}.{module.name}")
        act = getattr(adversary, "act", None)
        if not callable(act) or not adversary.__doc__:
            raise TypeError(f"{adversary.__name__} needs a docstring and a function act(task, messages, turn, rng)")
        found[module.name] = act
    return found
