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
class Met:
    """What an attack came to."""

    told: Any
    error: SandboxError | None


class Hostile:
    """One source; ``meet`` lets it attack. Coroutines of its own go through ``run``."""

    def __init__(self, runner: asyncio.Runner, source: SandboxSource) -> None:
        self.run = runner.run
        self.source = source

    async def order(self, episode: SandboxEpisode, attack: str, *given: Any) -> Any:
        """Have the episode carry out the attack; answers what it tells."""
        content = json.dumps({"do": attack, "with": given})
        step = await episode.step({"role": "assistant", "content": content})
        return json.loads(step.messages[0]["content"])

    async def begun(self) -> SandboxEpisode:
        """A new episode."""
        episode = self.source.episode()
        await episode.reset(0)
        return episode

    def meet(self, attack: str, *given: Any, fresh: bool = False) -> Met:
        """One attack in an episode of its own; ``fresh``: the container it ran in is replaced afterwards."""

        async def main() -> Met:
            try:
                met = Met(await self.order(await self.begun(), attack, *given), None)
            except SandboxError as error:
                met = Met(None, error)
            if fresh:
                await self.source.close()
            assert await self.order(await self.begun(), "nothing") == "nothing"
            return met

        began = time.monotonic()
        met = self.run(main())
        assert time.monotonic() - began < WITHIN_S
        return met


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
