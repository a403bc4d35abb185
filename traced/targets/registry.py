"""The target environments by name.

Fails with ``ConfigError`` for a name that is not there. Not covered: targets that are recorded traces only (they have
trajectories but no episodes; ``traced.ingest.importers.formats``).

Episodes of an environment that runs in this process: bundled and adapted targets, which are trusted code.

Invariants: every call of an environment runs on a thread of the source's own pool, so that a blocking step holds up
neither the event loop nor another episode while threads are free. How it fails: what the environment raises goes
through unchanged and is attributed by the rollout. Not covered: isolation (untrusted environments run in
``sandbox.client.SandboxSource``) and stopping a step that hangs: its thread stays until the step returns.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from sandbox.contract import Environment, Message, Score, Task
from sandbox.episodes import Episode, Step
from traced.config.settings import Settings
from traced.core.errors import ConfigError
from traced.targets import desk

THREADS = 64

P = ParamSpec("P")
T = TypeVar("T")


class LocalSource:
    """``EpisodeSource`` over a factory of in-process environments."""

    def __init__(self, name: str, factory: Callable[[], Environment], *, threads: int = THREADS) -> None:
        self._name = name
        self._factory = factory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"episodes-{name}")

    @property
    def name(self) -> str:
        """The source's name in trajectories."""
        return self._name

    def episode(self) -> Episode:
        """A fresh environment, not yet reset."""
        return _LocalEpisode(self._factory(), self._pool)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _LocalEpisode:
    def __init__(self, environment: Environment, pool: ThreadPoolExecutor) -> None:
        self._environment = environment
        self._pool = pool

    async def reset(self, seed: int) -> Task:
        return await self._call(self._environment.reset, seed)

    async def step(self, message: Message) -> Step:
        return await self._call(self._step, message)

    async def score(self) -> Score:
        return await self._call(self._environment.score)

    async def close(self) -> None:
        """Nothing is held beyond the environment object itself."""

    def _step(self, message: Message) -> Step:
        return Step(self._environment.step(message), self._environment.done)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))


SPLITS = ("train", "gate", "test")


@dataclass(frozen=True)
class Target:
    """A target: its seeds by split, its environment, and, for reports only, which capabilities a seed's task needs."""

    name: str
    splits: Mapping[str, range]
    environment: Callable[[], Environment]
    needed_capabilities: Callable[[int], set[str]]

    def source(self) -> LocalSource:
        """Its episodes, run in this process."""
        return LocalSource(self.name, self.environment)


def check_seeds(checked_target: Target, settings: Settings) -> None:
    """Raise ``ConfigError`` where the settings ask a split for more seeds than it has: none runs into the next one."""
    requirements = {
        "collect.episodes": ("train", settings.collect.episodes),
        "gate.seeds times gate.max_rounds": ("gate", settings.gate.seeds * settings.gate.max_rounds),
        "test.seeds": ("test", settings.test.seeds),
    }
    for key, (split, seeds) in requirements.items():
        available = len(checked_target.splits[split])
        if seeds > available:
            raise ConfigError(
                f"{key} is {seeds} and the {split} split of {checked_target.name} has {available} seeds",
                hint="ask for fewer",
            )


TARGETS = {"desk": Target("desk", desk.SPLITS, desk.Desk, desk.needed_capabilities)}


def target(name: str) -> Target:
    """The target of this name."""
    if name not in TARGETS:
        raise ConfigError(
            f"there is no target {name!r}; there is {', '.join(TARGETS)}",
            hint='set target.name = "desk" in traced.toml',
        )
    return TARGETS[name]
