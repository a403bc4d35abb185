"""The router beside the service, where ``serving.with_service`` asks for it: a child that is started again.

Invariants: the service goes on without it, whatever becomes of it; it ends with the service, after what is in flight.
How it fails: what keeps it from serving (a port that is taken, an engine that does not start) is in its log,
``DIR/logs/router.log``, and it is tried again. Not covered: agents that may not miss it while the service is started
anew: give them ``traced serve`` as a service of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from traced.config import Settings
from traced.executor.kept import Kept
from traced.executor.process import Child, start

GRACE_S = 90.0  # requests in flight, then the spool; systemd's own default


@dataclass
class _Router:
    child: Child

    @property
    def alive(self) -> bool:
        return not self.child.wait(0)

    def stop(self) -> None:
        self.child.stop(GRACE_S)


@asynccontextmanager
async def beside_router(settings: Settings) -> AsyncIterator[None]:
    """Keep a router as long as the body runs, if the settings ask for one."""
    if not settings.serving.with_service:
        yield
        return
    command = ["-m", "traced.serving.gateway", "--data-dir", str(settings.data_dir)]
    log: Path = settings.data_dir / "logs" / "router.log"
    kept = Kept("the router", lambda: _Router(start(command, log=log)))
    await kept.start()
    keeping = asyncio.create_task(kept.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await asyncio.to_thread(kept.stop)
