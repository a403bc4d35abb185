import asyncio
import os
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import eventually_async
from traced.gateway import worker_metrics
from traced.gateway.worker_metrics import STALE_S, WorkerMetrics


def worker(folder: Path, number: int, requests: int) -> WorkerMetrics:
    registry = CollectorRegistry()
    Counter("requests", "Answered requests.", ["model"], registry=registry).labels("base").inc(requests)
    Gauge("waiting", "Requests that wait.", registry=registry).set(number)
    return WorkerMetrics(folder, number, registry)


def samples(page: bytes) -> dict[tuple[str, str], float]:
    """The values by name and worker, but not the times of creation."""
    return {
        (sample.name, sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_page_of_each_worker_has_the_samples_of_all(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    first, second = worker(folder, 1, 3), worker(folder, 2, 4)
    second.publish()
    page = {("requests_total", "1"): 3, ("requests_total", "2"): 4, ("waiting", "1"): 1, ("waiting", "2"): 2}
    assert samples(first.exposition()) == page
    first.publish()
    # What it has published itself does not stand beside its newer values.
    assert first.exposition().count(b"requests_total{") == 2
    assert samples(second.exposition()) == page
    headers = [line for line in first.exposition().splitlines() if line.startswith(b"# TYPE requests_total")]
    assert len(headers) == 1


def test_a_dead_worker_and_a_file_that_is_being_written_are_left_out(tmp_path: Path) -> None:
    first, second = worker(tmp_path, 1, 3), worker(tmp_path, 2, 4)
    second.publish()
    (tmp_path / ".3.prom").write_bytes(b'waiting{worker="3"} 1.0\n')
    assert ("waiting", "2") in samples(first.exposition())
    long_ago = time.time() - STALE_S - 1
    os.utime(tmp_path / "2.prom", (long_ago, long_ago))
    assert {number for _, number in samples(first.exposition())} == {"1"}


async def test_metrics_that_cannot_be_written_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_metrics, "PUBLISH_S", 0.01)
    folder = tmp_path / "workers"
    folder.write_text("a file in the place of the folder")
    writing = asyncio.create_task(worker(folder, 1, 3).run())
    await asyncio.sleep(0.05)
    folder.unlink()
    await eventually_async(lambda: (folder / "1.prom").exists())
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
