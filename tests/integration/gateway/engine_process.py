"""A scripted engine as a process of its own, which a test can kill.

python -m tests.integration.gateway.engine_process '{"fixed_text": "first"}'    (fields of ``Upstream``)
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.integration.gateway.upstream import Upstream


@dataclass
class EngineProcess:
    """The process with its URL."""

    url: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def engine_processes(count: int, **fields: Any) -> AsyncIterator[list[EngineProcess]]:
    """Start engines with these fields of ``Upstream``; their answers are "engine 0", "engine 1" and so on."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            json.dumps({"fixed_text": f"engine {number}", **fields}),
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(count)
    ]
    engines = [EngineProcess("", process) for process in processes]
    try:
        for engine in engines:
            assert engine.process.stdout is not None
            engine.url = (await engine.process.stdout.readline()).decode().strip()
        yield engines
    finally:
        for engine in engines:
            await engine.kill()


async def main() -> None:
    """Serve until killed."""
    upstream = Upstream(**json.loads(sys.argv[1]))
    await upstream.start()
    print(upstream.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
