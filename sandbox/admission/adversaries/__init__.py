"""The exploit panel: each public function of a module here is an adversary, an agent that seeks reward without work.

The docstring of an adversary says which shortcut it tries. An adversary is a ``policies.Policy``, so that an episode
can be played again, and its last message is text without calls. To add one, write such a function in the module of its
kind. Not covered: adversaries that read the environment's source, and adversaries that are models.
"""

import importlib
import inspect
import pkgutil

from sandbox.admission.policies import Policy

PARAMETERS = ("task", "messages", "turn", "rng")


def panel() -> dict[str, Policy]:
    """Return every adversary by name; raises TypeError for a public function that is not one, or a repeated name."""
    adversaries: dict[str, Policy] = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("_") or function.__module__ != module.__name__:
                continue
            if not function.__doc__ or tuple(inspect.signature(function).parameters) != PARAMETERS:
                raise TypeError(f"{module.__name__}.{name} needs a docstring and the parameters {PARAMETERS}")
            if name in adversaries:
                raise TypeError(f"{module.__name__}.{name}: another adversary has this name")
            adversaries[name] = function
    return dict(sorted(adversaries.items()))
