"""Default settings by base model: what suits the bundled toy model does not suit a model of billions of parameters.

The defaults of the sections are those of the bundled models. Each other model begins with the values of its profile,
which are the TRACE paper's where the paper states one; they rank below the settings file.
"""

from typing import Any

Values = dict[str, dict[str, Any]]

BUNDLED = "bundled"
# TRACE, section 3 and appendix: a 30B model, K = 16 rollouts per seed, trajectories of 16k tokens and 15 to 30 turns.
PAPER: Values = {
    "collect": {"max_turns": 30},
    "training": {
        "lr": 1e-5,
        "iterations": 40,
        "groups": 8,
        "rollouts": 16,
        "max_turns": 30,
        "max_length": 16384,
        # A GPU holds one training of such a model.
        "at_once": 1,
    },
    "engine": {"max_length": 32768, "max_tokens": 4096},
    # Hidden states need the embedded engine, which is for small models.
    "routing": {"router": "labels"},
    "devices": {"train_on": "auto"},
}
# SmolLM2 has 8192 positions, runs on a CPU and is small enough for the embedded engine.
SMOLLM2: Values = {
    "training": {**PAPER["training"], "rollouts": 8, "max_turns": 16, "max_length": 2048},
    "engine": {"max_length": 4096, "max_tokens": 256},
    "devices": PAPER["devices"],
}


def profile(spec: str) -> Values:
    """Return the default settings of a base model that differ from those of the sections, by section and key."""
    profiles: dict[str, Values] = {BUNDLED: {}, "bundled-large": {}, "bundled-textworld": {}, "smollm2": SMOLLM2}
    return profiles.get(spec, PAPER)
