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
async def engine_process(**fields: Any) -> AsyncIterator[EngineProcess]:
    """Start an engine with these fields of ``Upstream``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, json.dumps(fields), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    engine = EngineProcess((await process.stdout.readline()).decode().strip(), process)
    try:
        yield engine
    finally:
        await engine.kill()


async def main() -> None:
    """Serve until killed."""
    upstream = Upstream(**json.loads(sys.argv[1]))
    await upstream.start()
    print(upstream.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
