"""What the router costs beside LiteLLM's proxy and vllm-router, in front of an engine that answers at once.

    python -m benchmarks.serving [--seconds-each 5] [--peers DIR] [--json]

At 1, 16 and 128 requests at once, streaming and not: the added latency (median and 99th percentile, the engine's own
subtracted), and requests a second. Every request is a conversation of its own; traced records each of them into SQLite
while it is measured, the others record nothing. All run one after the other on the same machine, with the load and the
engine beside them. The others are installed from the package index into ``--peers`` where they are not there yet.
Aims: five times LiteLLM's requests a second (the least favourable of the six cases), and a median overhead within twice
vllm-router's at one request at once. Exit code 1 when an aim is missed. Not covered: routing (``auto``), real engines.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import proxies
from benchmarks.serving.wire import Load, load

AIMS = {"throughput_over_litellm": 5.0, "overhead_over_vllm_router": 2.0}
CONCURRENCIES = (1, 16, 128)
WARM = 50


@dataclass(frozen=True)
class Case:
    """One measurement of one router: milliseconds added to the engine's, and requests a second."""

    router: str
    concurrency: int
    streamed: bool
    p50_ms: float
    p99_ms: float
    per_s: float
    failed: int


def measure(seconds: float, venvs: Path) -> dict[str, Any]:
    """All cases, and the aims."""
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="tb-") as name, proxies.engine() as engine:
        folder = Path(name)
        direct = {case: _run(engine, *case, seconds) for case in _cases()}
        behind: dict[str, AbstractContextManager[int]] = {
            "traced": proxies.traced(engine, folder),
            "litellm": proxies.litellm(engine, folder, venvs),
            "vllm-router": proxies.vllm_router(engine, folder, venvs),
        }
        for router, running in behind.items():
            with running as port:
                for case in _cases():
                    cases.append(_case(router, case, _run(port, *case, seconds), direct[case]))
                    print(_line(cases[-1]), flush=True)
    return _figures(cases)


def _cases() -> list[tuple[int, bool]]:
    return [(concurrency, streamed) for streamed in (False, True) for concurrency in CONCURRENCIES]


def _run(port: int, concurrency: int, streamed: bool, seconds: float) -> Load:
    async def run() -> Load:
        first = await load(port, concurrency=concurrency, requests=WARM, streamed=streamed, key=proxies.KEY)
        count = max(WARM, concurrency * 4)
        rate = (await load(port, concurrency=concurrency, requests=count, streamed=streamed, key=proxies.KEY)).seconds
        requests = max(count, round(count / rate * seconds))
        result = await load(port, concurrency=concurrency, requests=requests, streamed=streamed, key=proxies.KEY)
        return Load(result.latencies, result.seconds, result.failed + first.failed)

    return asyncio.run(run())


def _case(router: str, case: tuple[int, bool], load: Load, direct: Load) -> Case:
    p50, p99 = (1000 * (_share(load, share) - _share(direct, share)) for share in (50, 99))
    return Case(router, *case, p50, p99, len(load.latencies) / load.seconds, load.failed)


def _share(load: Load, percent: int) -> float:
    return statistics.quantiles(load.latencies, n=100)[percent - 1]


def _line(case: Case) -> str:
    mode = "streamed" if case.streamed else "whole"
    return (
        f"{case.router:12} {case.concurrency:4} at once, {mode:8}: +{case.p50_ms:7.2f} ms median, "
        f"+{case.p99_ms:7.2f} ms p99, {case.per_s:7.0f}/s, {case.failed} failed"
    )


def _figures(cases: Sequence[Case]) -> dict[str, Any]:
    by_key = {(case.router, case.concurrency, case.streamed): case for case in cases}
    throughput = min(by_key["traced", *case].per_s / by_key["litellm", *case].per_s for case in _cases())
    overhead = max(
        by_key["traced", 1, streamed].p50_ms / by_key["vllm-router", 1, streamed].p50_ms for streamed in (False, True)
    )
    passed = {
        "throughput_over_litellm": throughput >= AIMS["throughput_over_litellm"],
        "overhead_over_vllm_router": overhead <= AIMS["overhead_over_vllm_router"],
    }
    failed = sum(case.failed for case in cases if case.router == "traced")
    return {
        "throughput_over_litellm": throughput,
        "overhead_over_vllm_router": overhead,
        "failed": failed,
        "cases": [asdict(case) for case in cases],
        "aims": AIMS,
        "reached": passed,
        "meets": all(passed.values()) and not failed,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description="What the router costs.")
    parser.add_argument("--seconds-each", type=float, default=5.0, help="of each of the cases")
    parser.add_argument("--peers", type=Path, default=Path(tempfile.gettempdir()) / "traced-bench-peers")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    figures = measure(options.seconds_each, proxies.peers(options.peers.absolute()))
    print(f"{figures['throughput_over_litellm']:.1f} times LiteLLM's requests a second (aim: 5 and more)")
    print(f"{figures['overhead_over_vllm_router']:.1f} times vllm-router's median overhead (aim: 2 at most)")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
