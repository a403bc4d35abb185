"""The target environments by name.

Fails with ``ConfigError`` for a name that is not there. Not covered: targets that are recorded traces only (they have
trajectories but no episodes; ``traced.importers``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sandbox.contract import Environment
from traced.config import Settings
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


def check_seeds(chosen: Target, settings: Settings) -> None:
    """Raise ``ConfigError`` where the settings ask a split for more seeds than it has: none runs into the next one."""
    wanted = {
        "collect.episodes": ("train", settings.collect.episodes),
        "gate.seeds times gate.max_rounds": ("gate", settings.gate.seeds * settings.gate.max_rounds),
        "test.seeds": ("test", settings.test.seeds),
    }
    for key, (split, seeds) in wanted.items():
        there = len(chosen.splits[split])
        if seeds > there:
            raise ConfigError(
                f"{key} is {seeds} and the {split} split of {chosen.name} has {there} seeds", hint="ask for fewer"
            )


TARGETS = {"desk": Target("desk", desk.SPLITS, desk.Desk, desk.needed)}


def target(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise ConfigError(
            f"there is no target {name!r}; there is {', '.join(TARGETS)}",
            hint='set target.name = "desk" in traced.toml',
        )
    return TARGETS[name]
