"""The admission checks' context over an environment in this process, without a container.

Only for sources that the tests wrote themselves. What a worker adds (deadlines, bounds, effects) is not here.
"""

from typing import Any, cast

from sandbox.admission import Thresholds
from sandbox.admission.context import CheckContext
from sandbox.client import ORACLE_TURNS, SandboxSource
from sandbox.contract import Message, Score, Task
from sandbox.episodes import Step
from sandbox.errors import EnvironmentFault
from sandbox.wire import OraclePlay, OracleTurn


class Episode:
    """One episode; exceptions of the environment become environment faults."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        self.seconds = 0.0

    async def reset(self, seed: int) -> Task:
        return cast("Task", self.environment.reset(seed))

    async def step(self, message: Message) -> Step:
        try:
            return Step(self.environment.step(message), self.environment.done)
        except Exception as error:
            raise EnvironmentFault("step", str(error)) from error

    async def score(self) -> Score:
        return cast("Score", self.environment.score())

    async def close(self) -> None:
        pass


class Source:
    """Replaces a ``SandboxSource``."""

    def __init__(self, source_code: str) -> None:
        self.source_code = source_code
        self.names: dict[str, Any] = {}
        exec(compile(source_code, "environment.py", "exec"), self.names)

    @property
    def concurrency(self) -> int | None:
        """Return None: no limit."""
        return None

    def episode(self, trial: int = 0) -> Episode:
        return Episode(self.names["Environment"]())

    async def oracle(self, seed: int, turns: int = ORACLE_TURNS) -> OraclePlay:
        environment = self.names["Environment"]()
        task, turns_played = environment.reset(seed), []
        for message in environment.oracle():
            turns_played.append(OracleTurn(message, environment.step(message)))
            if environment.done or len(turns_played) >= turns:
                break
        return OraclePlay(task, turns_played, environment.done, environment.score())


def check_context(source_code: str, **thresholds: Any) -> CheckContext:
    """Create a check context whose source and replica are two copies of the module."""
    source, replica = (cast("SandboxSource", Source(source_code)) for _ in range(2))
    return CheckContext(source, replica, Thresholds(**thresholds), None, [])
