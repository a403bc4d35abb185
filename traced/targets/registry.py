"""The target environments by name.

Fails with ``ConfigError`` for a name that is not there. Not covered: targets that are recorded traces only (they have
trajectories but no episodes; ``traced.importers``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox.contract import Environment
from traced.errors import ConfigError
from traced.targets import desk
from traced.targets.local import LocalSource

SPLITS = ("train", "gate", "test")


@dataclass(frozen=True)
class Target:
    """A target: its seeds by split, its environment, and, for reports only, which capabilities a seed's task needs."""

    name: str
    splits: Mapping[str, range]
    environment: Callable[[], Environment]
    needed: Callable[[int], set[str]]

    def source(self) -> LocalSource:
        """Its episodes, run in this process."""
        return LocalSource(self.name, self.environment)


TARGETS = {"desk": Target("desk", desk.SPLITS, desk.Desk, desk.needed)}


def target(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise ConfigError(
            f"there is no target {name!r}; there is {', '.join(TARGETS)}",
            hint='set target.name = "desk" in traced.toml',
        )
    return TARGETS[name]
