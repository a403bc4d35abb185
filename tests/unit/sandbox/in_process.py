"""A bench over an environment of ours in this process: what a check of admission judges, without a container.

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
    """One episode; what the environment raises is its fault."""

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
    """Stands where a ``SandboxSource`` does."""

    def __init__(self, source_code: str) -> None:
        self.source_code = source_code
        self.names: dict[str, Any] = {}
        exec(compile(source_code, "environment.py", "exec"), self.names)

    def episode(self) -> Episode:
        return Episode(self.names["Environment"]())

    async def oracle(self, seed: int, turns: int = ORACLE_TURNS) -> OraclePlay:
        environment = self.names["Environment"]()
        task, played = environment.reset(seed), []
        for message in environment.oracle():
            played.append(OracleTurn(message, environment.step(message)))
            if environment.done or len(played) >= turns:
                break
        return OraclePlay(task, played, environment.done, environment.score())


def bench(source_code: str, **thresholds: Any) -> CheckContext:
    """Source and twin are two copies of the module."""
    source, twin = (cast("SandboxSource", Source(source_code)) for _ in range(2))
    return CheckContext(source, twin, Thresholds(**thresholds), None, [])
