"""A hostile environment in its sandbox, and what came of each attack: what it got, or the error the host answered with.

After every attack a new episode of the same source has to be served, in the same container or a fresh one.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.client import SandboxEpisode, SandboxSource
from sandbox.errors import SandboxError
from sandbox.policy import SandboxLimits
from tests.integration.owner import owner

ATTACKS = Path(__file__).parents[2] / "data/attacks"
WITHIN_S = 60.0  # what any attack may cost the host, on a busy machine
LIMITS = SandboxLimits(memory_mb=64, pids=16, tmp_mb=8, call_seconds=20.0, restarts=1000)


@dataclass(frozen=True)
class AttackResult:
    """What an attack came to."""

    reply: Any
    error: SandboxError | None


class Hostile:
    """One source; ``attack`` runs one attack. Coroutines of its own go through ``run``."""

    def __init__(self, runner: asyncio.Runner, source: SandboxSource) -> None:
        self.run = runner.run
        self.source = source

    async def execute(self, episode: SandboxEpisode, name: str, *arguments: Any) -> Any:
        """Have the episode carry out the attack; answers what it tells."""
        content = json.dumps({"do": name, "with": arguments})
        step = await episode.step({"role": "assistant", "content": content})
        return json.loads(step.messages[0]["content"])

    async def new_episode(self) -> SandboxEpisode:
        """A new episode."""
        episode = self.source.episode()
        await episode.reset(0)
        return episode

    def attack(self, name: str, *arguments: Any, fresh: bool = False) -> AttackResult:
        """One attack in an episode of its own; ``fresh``: the container it ran in is replaced afterwards."""

        async def main() -> AttackResult:
            try:
                result = AttackResult(await self.execute(await self.new_episode(), name, *arguments), None)
            except SandboxError as error:
                result = AttackResult(None, error)
            if fresh:
                await self.source.close()
            assert await self.execute(await self.new_episode(), "nothing") == "nothing"
            return result

        began = time.monotonic()
        result = self.run(main())
        assert time.monotonic() - began < WITHIN_S
        return result


@contextmanager
def hostile(family: str, limits: SandboxLimits = LIMITS) -> Iterator[Hostile]:
    """The attacks of a file in ``tests/data/attacks``, each of them a function."""
    code = (ATTACKS / "environment.py").read_text() + (ATTACKS / f"{family}.py").read_text()
    with asyncio.Runner() as runner:
        source = SandboxSource(code, limits=limits, owner=owner(family))
        runner.run(source.__aenter__())
        try:
            yield Hostile(runner, source)
        finally:
            runner.run(source.close())
