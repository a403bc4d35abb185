"""Run environments in this process, for tests and benchmarks that need no process of a target.

Every call of an environment runs on a thread of the source's own pool, so a blocking step delays neither the event loop
nor other episodes. Not covered: isolation (``sandbox.client.SandboxSource``, ``traced.targets.process``), and stopping
a step that hangs.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from sandbox.contract import Environment, Message, Score, Task
from sandbox.episodes import Episode, Step

THREADS = 64

P = ParamSpec("P")
T = TypeVar("T")


class LocalSource:
    """An ``EpisodeSource`` that runs environments, created by ``factory``, in this process."""

    def __init__(
        self, name: str, factory: Callable[[], Environment], *, threads: int = THREADS, concurrency: int | None = None
    ) -> None:
        self._name = name
        self._concurrency = concurrency
        self._factory = factory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"episodes-{name}")

    @property
    def name(self) -> str:
        """Return the source's name in trajectories."""
        return self._name

    @property
    def concurrency(self) -> int | None:
        """Return how many episodes may be open at once, None for any number."""
        return self._concurrency

    def episode(self, trial: int = 0) -> Episode:
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
        self._oracle: Iterator[Message] | None = None

    async def reset(self, seed: int) -> Task:
        return await self._call(self._environment.reset, seed)

    async def step(self, message: Message) -> Step:
        return await self._call(self._step, message)

    async def score(self) -> Score:
        return await self._call(self._environment.score)

    async def gold_message(self) -> Message | None:
        """Return the next message of the environment's oracle, None at its end."""
        return await self._call(self._next_gold)

    def _next_gold(self) -> Message | None:
        if self._oracle is None:
            self._oracle = self._environment.oracle()
        return None if self._environment.done else next(self._oracle, None)

    async def close(self) -> None:
        """Do nothing: only the environment object itself is held."""

    def _step(self, message: Message) -> Step:
        return Step(self._environment.step(message), self._environment.done)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
