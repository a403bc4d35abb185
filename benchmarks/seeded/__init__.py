"""A store with everything to look at, made from a seed: for pictures, for tests of screens, and for benchmarks.

Nothing in it was computed by a model: it has the forms of real rows and figures that are plausible, so that a screen
shows what it would show. Four capabilities in three cycles; one adapter is live, one waits for a decision, one was
rejected, one is a canary. The newest cycle waits; its training curves, environments, labels and gates are all there.
"""

from benchmarks.seeded.store import Seeded, seed_store

__all__ = ["Seeded", "seed_store"]
