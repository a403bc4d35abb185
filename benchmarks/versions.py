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
BY_NAME_SHARE = 0.3  # share of the requests that ask for a version by name
CONVERSATIONS = 2000  # of the others, each given to a capability: they go on with its live version
TOKENS = (1, 2, 4, 16)
EXPECTED_STATUSES = (404, 503)  # a version that is asked for by name, and live no more or not yet


@dataclass
class History:
    """Time spans in which each version was live, from before its promotion until after its replacement."""

    spans: dict[str, list[list[float]]] = field(default_factory=dict)

    def change(self, began: float, live: set[str]) -> None:
        """Open spans at ``began`` for the live versions, and close those of all others now."""
        now = time.monotonic()
        for name in live:
            spans = self.spans.setdefault(name, [])
            if not spans or spans[-1][1] < float("inf"):
                spans.append([began, float("inf")])
        for name, spans in self.spans.items():
            if name not in live and spans[-1][1] == float("inf"):
                spans[-1][1] = now

    def live(self, name: str, start: float, end: float) -> bool:
        """Whether the version was live at some time between ``start`` and ``end``."""
        return any(first <= end and last >= start for first, last in self.spans.get(name, []))


@dataclass
class Race:
    """The traffic and the counts of its answers."""

    installation: Installation
    url: str
    target_answers: int
    rng: random.Random
    pause_s: float
    history: History = field(default_factory=History)
    live: dict[str, str] = field(default_factory=dict)
    other_outcomes: Counter[str] = field(default_factory=Counter)
    answers_by_model: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    lag_s: float = LAG_S
    changes: int = 0

    @property
    def skills(self) -> list[str]:
        """The capabilities."""
        return sorted({name.partition("@")[0] for name in self.installation.versions})

    @property
    def answer_count(self) -> int:
        """Number of answered requests."""
        return self.answers_by_model.total()

    async def client(self, http: aiohttp.ClientSession, number: int) -> None:
        """Send requests until ``target_answers`` are answered."""
        rng = random.Random(number)
        prompts = questions(50, seed=number)
        while self.answer_count < self.target_answers:
            by_name = rng.random() < BY_NAME_SHARE
            model = rng.choice([*self.live.values(), BASE]) if by_name else "auto"
            body: dict[str, Any] = {"model": model, "messages": rng.choice(prompts), "temperature": 0}
            body |= {"max_tokens": rng.choice(TOKENS), "stream": rng.random() < 0.3}
            headers = {"X-Traced-Conversation": f"c-{rng.randrange(CONVERSATIONS)}"}
            began = time.monotonic()
            async with http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
                text = await answer.text()
            if answer.status != 200:
                expected = by_name and answer.status in EXPECTED_STATUSES
                self.other_outcomes[
                    f"refused with {answer.status}" if expected else f"failed with {answer.status}"
                ] += 1
                continue
            self.judge(answer.headers["X-Traced-Model"], answer_text(text, streamed=body["stream"]), began)

    def judge(self, model: str, text: str, began: float) -> None:
        """Count an answer and check its signature and that its version was live."""
        self.answers_by_model[model] += 1
        versions = self.installation.versions
        signed_by = [name for name, version in versions.items() if version.signs(text)]
        if signed_by != ([] if model == BASE else [model]):
            self.wrong.append(f"{model} answered {text!r}, signed by {signed_by}")
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
            now = self.installation.roll_back(self.live[skill])
            if now is None:
                del self.live[skill]
            else:
                self.live[skill] = now
            return
        versions = [name for name in self.installation.versions if name.startswith(f"{skill}@")]
        name = self.rng.choice([other for other in versions if other != self.live.get(skill)])
        self.installation.promote(name)
        self.live[skill] = name


async def check_signatures(installation: Installation, engine: str) -> None:
    """Load each adapter alone and check its signature. Raises ``AssertionError``."""
    prompts = questions(6, seed=99)
    async with EngineClient(engine) as client:
        for number, (name, version) in enumerate(installation.versions.items()):
            model = f"check-{number}"  # no version's name: the router leaves it alone
            await client.load_adapter(model, version.path)
            answers = [client.chat(model, prompt, [], temperature=0.0, max_tokens=max(TOKENS)) for prompt in prompts]
            texts = [str(reply.message["content"]) for reply in await asyncio.gather(*answers)]
            assert all(map(version.signs, texts)), f"{name} does not sign: {texts}"
            await client.unload_adapter(model)


async def race(installation: Installation, url: str, requests: int, clients: int, pause_s: float = PAUSE_S) -> Race:
    """Send ``requests`` requests while versions are promoted and rolled back."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        async with http.get(f"{url}/ready") as answer:
            (engine,) = (await answer.json())["engines"]
        await check_signatures(installation, engine)
        run = Race(installation, url, requests, random.Random(0), pause_s, live=installation.live())
        run.history.change(time.monotonic(), set(run.live.values()))
        for number, skill in enumerate(run.skills):
            installation.route(
                [f"c-{conversation}" for conversation in range(number, CONVERSATIONS, len(run.skills))], f"{skill}@v1"
            )
        changing = asyncio.create_task(run.promotions())
        try:
            await asyncio.gather(*(run.client(http, number) for number in range(clients)))
        finally:
            changing.cancel()
    return run


def measure(engine: str, requests: int, clients: int, slots: int | None) -> dict[str, Any]:
    """Run the race on a new installation and return its figures."""
    settings = [f"serving.max_adapters={PLACES}"]
    if engine == "vllm":
        settings += vllm_settings(need_vllm())
        if slots is not None:
            settings.append(f'engine.vllm_args=["--max-loras={slots}"]')
    with tempfile.TemporaryDirectory(prefix="tb-") as name:
        folder = Path(name)
        context = installed(folder / "data", folder / "adapters", CAPABILITIES, VERSIONS)
        with context as installation, serving(installation.data_dir, settings) as gateway:
            began = time.monotonic()
            run = asyncio.run(race(installation, gateway.url, requests, clients))
            seconds = time.monotonic() - began
    return {
        "engine": engine,
        "answered": run.answer_count,
        "wrong": len(run.wrong),
        "late": len(run.late),
        "examples": [*run.wrong, *run.late][:5],
        "changes": run.changes,
        "by_model": dict(run.answers_by_model),
        "others": dict(run.other_outcomes),
        "seconds": seconds,
        "meets": not run.wrong
        and not run.late
        and not any(outcome.startswith("failed") for outcome in run.other_outcomes),
    }


def answer_text(text: str, *, streamed: bool) -> str:
    """The complete text of an answer, streamed or not."""
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
    options = parser.parse_args(arguments)
    figures = measure(options.engine, options.requests, options.clients, options.slots)
    print(f"{figures['answered']} answers in {figures['seconds']:.0f} s, {figures['changes']} promotions and rollbacks")
    print(f"{figures['wrong']} by another adapter than the one named, {figures['late']} by one that was not live")
    for example in figures["examples"]:
        print(f"  {example}")
    for outcome, count in sorted(figures["others"].items()):
        print(f"{outcome}: {count}")
    if options.json:
        print(json.dumps(figures))
    return 0 if figures["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
