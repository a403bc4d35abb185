"""Run episodes of a synthetic environment, many at once, all in one container.

Invariants: environment code never runs in this process; every value is checked (``wire.py``) before it is returned; a
container that died is replaced for later episodes, at most ``limits.restarts`` times, while its own episodes raise the
error that ended it. A user that is a model is asked here, and only its messages enter the container. Not covered:
concurrency limits, which the rollout sets, and turning errors into outcomes.
"""

import asyncio
import itertools
from typing import Any

from sandbox.container import Sandbox
from sandbox.contract import Message, Score, Task
from sandbox.docker_engine import reap_orphans
from sandbox.episodes import Step
from sandbox.errors import EnvironmentFault, SandboxError
from sandbox.hashing import environment_hash
from sandbox.policy import TRAINING_HASH_SEED, SandboxLimits
from sandbox.user import MAX_REQUEST_BYTES, MAX_REQUESTS, User, UserTurns
from sandbox.wire import OraclePlay, read_effects, read_oracle, read_score

__all__ = ["SandboxEpisode", "SandboxSource", "environment_hash", "reap_orphans"]

ORACLE_TURNS = 64
OUT_OF_MEMORY = "a process was killed for memory"
# The oracle operation plays a whole episode, so its budget is the time of this many calls.
ORACLE_BUDGET_CALLS = 4


class SandboxSource:
    """An ``EpisodeSource`` that runs in one container; ``name`` defaults to "env:<hash12>".

    ``user`` speaks to the agent if the environment asks for a user that is a model; later episodes have the user that
    it is set to.

    Use it with ``async with``. Entering raises EngineDown, ImageMissing, or EnvironmentFault if the source cannot be
    loaded.
    """

    def __init__(
        self,
        source_code: str,
        *,
        limits: SandboxLimits | None = None,
        name: str | None = None,
        hash_seed: int = TRAINING_HASH_SEED,
        owner: str = "traced",
        user: User | None = None,
    ) -> None:
        self.source_code = source_code
        self.user = user
        self.limits = limits or SandboxLimits()
        self.restarts = 0
        self._name = name or f"env:{environment_hash(source_code)[:12]}"
        self._hash_seed = hash_seed
        self._owner = owner
        self._sandbox: Sandbox | None = None
        self._start_lock = asyncio.Lock()
        self._ids = itertools.count(1)

    @property
    def name(self) -> str:
        """The name of the source, stored as ``Trajectory.source``."""
        return self._name

    async def __aenter__(self) -> "SandboxSource":
        self._sandbox = await self._start_sandbox()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self, within_s: float | None = None) -> None:
        """End and remove the container; ``within_s`` as in ``Sandbox.close``."""
        if self._sandbox is not None:
            await self._sandbox.close(within_s)

    async def _start_sandbox(self) -> Sandbox:
        return await Sandbox.start(self.source_code, limits=self.limits, hash_seed=self._hash_seed, owner=self._owner)

    async def sandbox(self) -> Sandbox:
        """Return the running container, or start a new one if the last has failed.

        Raises the failure of the last container once the restarts are used up.
        """
        # Many episodes may call this at once; only one of them may start the next container.
        async with self._start_lock:
            if self._sandbox is None:
                raise RuntimeError("use SandboxSource with 'async with'")
            failure = self._sandbox.failure
            if failure is not None:
                if self.restarts >= self.limits.restarts:
                    raise failure
                self.restarts += 1
                await self._sandbox.close()
                self._sandbox = await self._start_sandbox()
            return self._sandbox

    @property
    def concurrency(self) -> int | None:
        """Return None: any number of its episodes may be open at once."""
        return None

    def episode(self, trial: int = 0) -> "SandboxEpisode":
        """Return a new episode, not yet reset."""
        return SandboxEpisode(self, f"e{next(self._ids)}", trial)

    async def oracle(self, seed: int, turns: int = ORACLE_TURNS) -> OraclePlay:
        """Let the environment's oracle play ``seed`` to its end, at most ``turns`` assistant messages."""
        sandbox = await self.sandbox()
        budget = self.limits.call_seconds * ORACLE_BUDGET_CALLS
        answer = await sandbox.call("oracle", budget=budget, seed=seed, turns=turns)
        return read_oracle(answer.value, answer.seconds, answer.bytes)

    async def effects(self) -> dict[str, Any]:
        """Return the side effects of the environment since the running container loaded it (``effects.py``)."""
        sandbox = await self.sandbox()
        record = read_effects((await sandbox.call("effects")).value)
        # Environment code can suppress entries of the worker's record, but not the engine's event for lack of memory.
        if await sandbox.ran_out_of_memory():
            record["events"].insert(0, OUT_OF_MEMORY)
            record["count"] += 1
        return record


class SandboxEpisode:
    """One episode in the container; ``seconds`` is the duration of its last operation inside the worker."""

    def __init__(self, source: SandboxSource, name: str, trial: int = 0) -> None:
        self._source = source
        self._name = name
        self._trial = trial
        self._turns = self._new_turns()
        self._sandbox: Sandbox | None = None
        self.seconds = 0.0
        # Total size of all responses since the reset.
        self._bytes = 0

    async def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        if self._sandbox is None:
            raise RuntimeError(f"reset the episode before '{op}'")
        answer = await self._sandbox.call(op, episode=self._name, **fields)
        self.seconds += answer.seconds
        self._bytes += answer.bytes
        limit_kb = self._source.limits.message_kb
        # Many small responses would fill the host's memory just like a large one.
        if self._bytes > limit_kb * 1024:
            raise EnvironmentFault(op, f"the episode's answers hold more than {limit_kb:,} KiB together; shorten them")
        return answer.value or {}

    async def reset(self, seed: int) -> Task:
        """Start the task instance of ``seed`` and return its task."""
        self._sandbox = await self._source.sandbox()
        self._bytes, self.seconds = 0, 0.0
        self._turns = self._new_turns()
        return await self._turns.task(await self._call("reset", seed=seed))

    async def step(self, message: Message) -> Step:
        """Send one assistant message and return the replies; the user speaks in between, if it is a model."""
        self.seconds = 0.0
        return await self._turns.step(await self._call("step", message=message))

    def _new_turns(self) -> UserTurns:
        async def send(text: str) -> dict[str, Any]:
            return await self._call("user", text=text)

        return UserTurns(self._source.user, self._trial, send, MAX_REQUESTS, MAX_REQUEST_BYTES)

    async def score(self) -> Score:
        """Return the current score."""
        self.seconds = 0.0
        return read_score((await self._call("score")).get("score"))

    async def close(self) -> None:
        """Discard the episode in the worker."""
        # A sandbox that has failed has no episodes left to discard.
        if self._sandbox is not None and self._sandbox.failure is None:
            try:
                await self._call("close")
            except SandboxError:
                return
