"""What the router costs beside LiteLLM's proxy and vllm-router, in front of an engine that answers at once.

    python -m benchmarks.serving [--seconds-each 5] [--routers traced,litellm,vllm-router] [--peers DIR] [--json]

At 1, 16 and 128 requests at once, streaming and not: the added latency (median and 99th percentile, the engine's own
subtracted), and requests a second. Every request is a conversation of its own. traced and LiteLLM are measured with a
key and a record of every exchange (traced: in SQLite; LiteLLM: in a file), and without both; vllm-router checks no keys
and records nothing. traced is measured with the model ``base`` and with ``auto``, for which its label router asks the
engine once per conversation and the engine names an adapter; an answer of base by default counts as failed. All run one
after the other on the same machine, with the load and the engine beside them. The others are installed from the package
index into ``--peers`` where they are not there yet.

Aims, with keys and records: five times LiteLLM's requests a second (the least favourable of the six cases), a median
overhead within twice that of vllm-router, which has neither, at one request at once, ``auto`` with half of the requests
a second of ``base`` (the least favourable case) and within twice its median overhead at one request at once. The same
two ratios of the whole latency, the engine's included, stand beside them. Exit code 1 when an aim is missed or a router
of the aim was left out. Not covered: real engines.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import proxies
from benchmarks.serving.wire import Load, load

ROUTERS = ("traced", "litellm", "vllm-router")
CONCURRENCIES = (1, 16, 128)
WARM = 50


@dataclass(frozen=True)
class Aim:
    """A ratio that has to be at least or at most ``bound``."""

    bound: float
    at_least: bool
    text: str

    def is_reached(self, ratio: float | None) -> bool:
        """Return whether the ratio was measured and is within the bound."""
        return ratio is not None and (ratio >= self.bound if self.at_least else ratio <= self.bound)


AIMS = {
    "throughput_over_litellm": Aim(5.0, True, "times LiteLLM's requests a second"),
    "overhead_over_vllm_router": Aim(2.0, False, "times vllm-router's median overhead"),
    "auto_throughput_over_base": Aim(0.5, True, "of the requests a second of base with auto"),
    "auto_overhead_over_base": Aim(2.0, False, "times the median overhead of base with auto"),
}


@dataclass(frozen=True)
class Case:
    """One measurement of one router: the engine's own milliseconds, those added to them, and requests a second."""

    router: str
    keys_and_records: bool
    model: str
    concurrency: int
    streamed: bool
    engine_p50_ms: float
    p50_ms: float
    p99_ms: float
    per_s: float
    failed: int


def measure(seconds: float, routers: Sequence[str], venvs: Path) -> dict[str, Any]:
    """All cases, and the aims."""
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="tb-") as name, proxies.engine() as engine:
        direct = {case: _run(proxies.RunningRouter(engine), "base", *case, seconds) for case in _cases()}
        for router in routers:
            for keys_and_records in (True, False) if router != "vllm-router" else (False,):
                folder = Path(name) / f"{router}-{keys_and_records}"
                with _started(router, engine, folder, venvs, keys_and_records=keys_and_records) as running:
                    # Without its records, auto is the same.
                    for model in ("base", "auto") if router == "traced" and keys_and_records else ("base",):
                        for case in _cases():
                            result = _run(running, model, *case, seconds)
                            cases.append(_case((router, keys_and_records, model), case, result, direct[case]))
                            print(_line(cases[-1]), flush=True)
    return figures_of(cases)


def _started(
    router: str, engine: int, folder: Path, venvs: Path, *, keys_and_records: bool
) -> AbstractContextManager[proxies.RunningRouter]:
    if router == "traced":
        return proxies.traced(engine, folder, keys_and_records=keys_and_records)
    if router == "litellm":
        return proxies.litellm(engine, folder, venvs, keys_and_records=keys_and_records)
    return proxies.vllm_router(engine, folder, venvs)


def _cases() -> list[tuple[int, bool]]:
    return [(concurrency, streamed) for streamed in (False, True) for concurrency in CONCURRENCIES]


def _run(router: proxies.RunningRouter, model: str, concurrency: int, streamed: bool, seconds: float) -> Load:
    async def send(requests: int) -> Load:
        return await load(
            router.port, concurrency=concurrency, requests=requests, model=model, streamed=streamed, key=router.key
        )

    async def run() -> Load:
        first = await send(WARM)
        count = max(WARM, concurrency * 4)
        rate = (await send(count)).seconds
        result = await send(max(count, round(count / rate * seconds)))
        return Load(result.latencies, result.seconds, result.failed + first.failed)

    return asyncio.run(run())


def _case(variant: tuple[str, bool, str], case: tuple[int, bool], load: Load, direct: Load) -> Case:
    p50, p99 = (1000 * (_share(load, share) - _share(direct, share)) for share in (50, 99))
    return Case(*variant, *case, 1000 * _share(direct, 50), p50, p99, len(load.latencies) / load.seconds, load.failed)


def _share(load: Load, percent: int) -> float:
    return statistics.quantiles(load.latencies, n=100)[percent - 1]


def _line(case: Case) -> str:
    mode = "streamed" if case.streamed else "whole"
    name = f"{case.router} {case.model}{'' if case.keys_and_records else ', no keys'}"
    return (
        f"{name:26} {case.concurrency:4} at once, {mode:8}: +{case.p50_ms:7.2f} ms median, "
        f"+{case.p99_ms:7.2f} ms p99, {case.per_s:7.0f}/s, {case.failed} failed"
    )


def figures_of(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the ratios of the aims, with keys and records and without both; None for what was not measured."""
    # vllm-router has no keys and no records: what it has is compared with both.
    ratios = _ratios([case for case in cases if case.keys_and_records or case.router == "vllm-router"])
    plain_ratios = _ratios([case for case in cases if not case.keys_and_records])
    aims_met = {name: aim.is_reached(ratios[name]) for name, aim in AIMS.items()}
    failed = sum(case.failed for case in cases if case.router == "traced")
    return {
        **ratios,
        "without_keys_and_records": {
            name: ratio for name, ratio in plain_ratios.items() if not name.startswith("auto")
        },
        "failed": failed,
        "cases": [asdict(case) for case in cases],
        "aims": {name: aim.bound for name, aim in AIMS.items()},
        "reached": aims_met,
        "meets": all(aims_met.values()) and not failed,
    }


def _ratios(cases: Sequence[Case]) -> dict[str, float | None]:
    by_key = {(case.router, case.model, case.concurrency, case.streamed): case for case in cases}

    def per_s(first: tuple[str, str], second: tuple[str, str]) -> float | None:
        if (*second, 1, False) not in by_key or (*first, 1, False) not in by_key:
            return None
        return min(by_key[*first, *case].per_s / by_key[*second, *case].per_s for case in _cases())

    def ratio_of_medians(
        first: tuple[str, str], second: tuple[str, str], figure: Callable[[Case], float] = lambda case: case.p50_ms
    ) -> float | None:
        if (*second, 1, False) not in by_key or (*first, 1, False) not in by_key:
            return None
        return max(
            figure(by_key[*first, 1, streamed]) / figure(by_key[*second, 1, streamed]) for streamed in (False, True)
        )

    def latency(case: Case) -> float:
        return case.engine_p50_ms + case.p50_ms

    base, auto = ("traced", "base"), ("traced", "auto")
    return {
        "throughput_over_litellm": per_s(base, ("litellm", "base")),
        "overhead_over_vllm_router": ratio_of_medians(base, ("vllm-router", "base")),
        "latency_over_vllm_router": ratio_of_medians(base, ("vllm-router", "base"), latency),
        "auto_throughput_over_base": per_s(auto, base),
        "auto_overhead_over_base": ratio_of_medians(auto, base),
        "auto_latency_over_base": ratio_of_medians(auto, base, latency),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description="What the router costs.")
    parser.add_argument("--seconds-each", type=float, default=5.0, help="of each of the cases")
    parser.add_argument("--routers", default=",".join(ROUTERS), help="which of them are measured")
    parser.add_argument("--peers", type=Path, default=Path(tempfile.gettempdir()) / "traced-bench-peers")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    routers = options.routers.split(",")
    if unknown := set(routers) - set(ROUTERS):
        parser.error(f"unknown routers: {', '.join(sorted(unknown))}")
    venvs = options.peers.absolute()
    if routers != ["traced"]:
        proxies.peers(venvs)
    figures = measure(options.seconds_each, routers, venvs)
    for name, aim in AIMS.items():
        ratio = "not measured:" if figures[name] is None else f"{figures[name]:.2f}"
        print(f"{ratio} {aim.text} (aim: {aim.bound:g} {'and more' if aim.at_least else 'at most'})")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
