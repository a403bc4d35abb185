"""``traced serve`` as the benchmark of routers starts it: its settings exist, and ``auto`` reaches an adapter."""

from pathlib import Path

import pytest

from benchmarks.serving import proxies
from benchmarks.serving.wire import load


@pytest.mark.slow
async def test_auto_is_decided_by_a_router(tmp_path: Path) -> None:
    with proxies.engine() as engine, proxies.traced(engine, tmp_path / "traced", keys_and_records=True) as router:
        for streamed in (False, True):
            result = await load(
                router.port, concurrency=4, requests=20, model="auto", streamed=streamed, key=router.key
            )
            assert (len(result.latencies), result.failed) == (20, 0)
        unauthorized = await load(router.port, concurrency=1, requests=2, model="base", streamed=False)
        assert unauthorized.failed == 2
