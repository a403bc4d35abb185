"""The target environments by name, and their episodes, which run in this process.

Bundled and adapted targets are trusted code. Every call of an environment runs on a thread of the source's own pool,
so a blocking step delays neither the event loop nor other episodes. Not covered: isolation
(``sandbox.client.SandboxSource``), stopping a step that hangs, and targets that consist of recorded traces only.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from sandbox.contract import Environment, Message, Score, Task
from sandbox.episodes import Episode, Step
from traced.core.errors import ConfigError
from traced.targets import desk

if TYPE_CHECKING:
    from traced.config.settings import Settings

THREADS = 64

P = ParamSpec("P")
T = TypeVar("T")


class LocalSource:
    """An ``EpisodeSource`` that runs environments, created by ``factory``, in this process."""

    def __init__(self, name: str, factory: Callable[[], Environment], *, threads: int = THREADS) -> None:
        self._name = name
        self._factory = factory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"episodes-{name}")

    @property
    def name(self) -> str:
        """Return the source's name in trajectories."""
        return self._name

    def episode(self) -> Episode:
        """Return a fresh environment, not yet reset."""
        return _LocalEpisode(self._factory(), self._pool)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Waiting could block for ever: a hanging step cannot be stopped.
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
        """Do nothing: only the environment object itself is held."""

    def _step(self, message: Message) -> Step:
        return Step(self._environment.step(message), self._environment.done)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))


SPLITS = ("train", "gate", "test")


@dataclass(frozen=True)
class Target:
    """A target: its seeds by split, its environment, and, for reports only, the capabilities that a task needs."""

    name: str
    splits: Mapping[str, range]
    environment: Callable[[], Environment]
    needed_capabilities: Callable[[int], set[str]]

    def source(self) -> LocalSource:
        """Return its episodes, run in this process."""
        return LocalSource(self.name, self.environment)


def check_seeds(checked_target: Target, settings: "Settings") -> None:
    """Raise ``ConfigError`` if the settings need more seeds than a split has."""
    # Beyond its end a split would run into the next one, and train on test tasks.
    requirements = {
        "collect.episodes": ("train", settings.collect.episodes),
        "gate.seeds times gate.max_rounds": ("gate", settings.gate.seeds * settings.gate.max_rounds),
        "test.seeds": ("test", settings.test.seeds),
    }
    for key, (split, seeds) in requirements.items():
        available = len(checked_target.splits[split])
        if seeds > available:
            raise ConfigError(
                f"{key} is {seeds}, but the {split} split of {checked_target.name} has {available} seeds",
                hint=f"lower {key.partition(' ')[0]}",
            )


TARGETS = {"desk": Target("desk", desk.SPLITS, desk.Desk, desk.needed_capabilities)}


def target(name: str) -> Target:
    """Return the target of this name; raises ``ConfigError``."""
    if name not in TARGETS:
        raise ConfigError(
            f"unknown target {name!r}; known: {', '.join(TARGETS)}",
            hint='set target.name = "desk" in traced.toml',
        )
    return TARGETS[name]
