"""Episodes of an environment that runs in this process: bundled and adapted targets, which are trusted code.

Invariants: every call of an environment runs on a thread of the source's own pool, so that a blocking step holds up
neither the event loop nor another episode while threads are free. How it fails: what the environment raises goes
through unchanged and is attributed by the rollout. Not covered: isolation (untrusted environments run in
``sandbox.client.SandboxSource``) and stopping a step that hangs: its thread stays until the step returns.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from sandbox.contract import Environment, Message, Score, Task
from sandbox.episodes import Episode, Step

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
