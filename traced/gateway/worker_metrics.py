"""The metrics of several workers of a gateway as one page: each sample has the label ``worker``.

    DATA/workers/N.prom     the metrics of worker N in Prometheus' text format, rewritten every ``PUBLISH_S`` seconds

A label keeps the counters of each process apart, so that the restart of one is no reset of the others.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

PUBLISH_S = 1.0
# The metrics of a worker that has not written them for this time are those of a dead process.
STALE_S = 10.0
log = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerMetrics(Collector):
    """The metrics of all workers of a data directory, each sample with the label ``worker``."""

    folder: Path
    number: int
    registry: CollectorRegistry

    def collect(self) -> Iterator[Metric]:
        """Yield this worker's metric families with the label."""
        for family in self.registry.collect():
            for index, sample in enumerate(family.samples):
                family.samples[index] = sample._replace(labels={**sample.labels, "worker": str(self.number)})
            yield family

    async def run(self) -> None:
        """Write this worker's metrics every ``PUBLISH_S`` seconds, until cancelled."""
        while True:
            try:
                self.publish()
            except OSError as error:
                log.debug("the metrics of worker %d cannot be written: %s", self.number, error)
            await asyncio.sleep(PUBLISH_S)

    def publish(self) -> None:
        """Write this worker's metrics; raises ``OSError``."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        path = self.folder / f".{self.number}.prom"
        path.write_bytes(self._own_text())
        path.rename(self.folder / f"{self.number}.prom")

    def exposition(self) -> bytes:
        """Return the metrics of all running workers in Prometheus' text format."""
        texts = [self._own_text()]
        for path in sorted(self.folder.glob("[0-9]*.prom")):
            # A worker may end meanwhile.
            with contextlib.suppress(OSError):
                if path.stem != str(self.number) and time.time() - path.stat().st_mtime < STALE_S:
                    texts.append(path.read_bytes())
        return merged(texts)

    def _own_text(self) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def merged(texts: Sequence[bytes]) -> bytes:
    """Merge texts in Prometheus' format: the samples of a family must stand together, after one header."""
    families: dict[bytes, list[bytes]] = {}
    headers: dict[bytes, list[bytes]] = {}
    for text in texts:
        name = b""
        for line in text.splitlines():
            if line.startswith((b"# HELP ", b"# TYPE ")):
                name = line.split(b" ", 3)[2]
                lines = headers.setdefault(name, [])
                if line not in lines:
                    lines.append(line)
            else:
                families.setdefault(name, []).append(line)
    return b"".join(line + b"\n" for name, header in headers.items() for line in (*header, *families.get(name, ())))
