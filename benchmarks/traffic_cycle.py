"""From an agent's traffic to adapters that take traffic, without a simulator of its world.

    python -m benchmarks.traffic_cycle [--cycles 1] [--conversations 300] [--paired 150] [--canary 1000] [--seed 0]
                                       [--set KEY=VALUE] [--into DIR] [--json]

An agent serves the users of the bundled desk with the bundled model. ``traced`` knows nothing of the desk: its target
is ``kind = "recorded"``, and it sees the requests at its router and the feedback, in ``traced up``.

1. The agent serves ``--paired`` tasks, without feedback: their outcomes stay unknown to traced.
2. It serves ``--conversations`` other tasks, and gives feedback. That many conversations trigger a cycle. With
   ``--cycles`` above 1 each cycle is requested instead, because those of step 4 would trigger one in the middle of it.
3. Every adapter that waits for a decision is approved as a shadow, gets ``SHADOWED`` conversations, and is then
   approved as a canary.
4. The agent serves new tasks with feedback until each canary is live or rolled back, at most ``--canary`` tasks.
5. It serves the tasks of step 1 again. With ``--cycles`` above 1 it then goes on with step 2.

Aims: an adapter is promoted; success on the tasks of step 1 rises by ``gain`` with an interval above 0; at most 40
minutes per cycle. Exit code 1 when one is missed. A folder that is given with ``--into`` keeps the data directory.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import httpx
from openai import AsyncOpenAI

from sandbox.contract import Message
from sandbox.episodes import Episode
from traced.config.settings import load_settings
from traced.evaluation.intervals import Pair, compare
from traced.inference.engine_process import free_port
from traced.targets.registry import target

ROOT = Path(__file__).parents[1]
TARGET = "shop"
AIMS = {"promoted": 1, "gain": 0.15, "ci_low_above": 0.0, "minutes": 40}
CONCURRENCY = 16  # conversations at once
MAX_TURNS = 12
TEMPERATURE = 0.7
SHADOWED = 40
BATCH = 100  # canary conversations between two looks
POLL_S = 2.0
CYCLE_S = 3600.0
FINAL_STATES = ("finished", "failed")
# The first tasks of the train split are those of step 1.
TASKS = range(500_000, 600_000)


@dataclass
class Place:
    """A data directory with a running service and router, and the agent that uses them."""

    folder: Path
    port: int
    settings: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The router's address."""
        return f"http://127.0.0.1:{self.port}"

    async def traced(self, *arguments: str) -> dict[str, Any]:
        """Run a command with ``--json`` and return its report; raises ``SystemExit`` if it fails."""
        command = [sys.executable, "-m", "traced", *arguments, "--data-dir", str(self.folder / "data"), "--json"]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await process.communicate()
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{err.decode()}")
        report: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        return report

    @contextlib.asynccontextmanager
    async def service(self) -> AsyncIterator[None]:
        """Run ``traced up`` with the router, and wait until it serves the base model."""
        options = [part for key, value in self.settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "traced", "up", "--data-dir", str(self.folder / "data"), *options]
        with (self.folder / "service.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, cwd=self.folder, env=self.env, stdout=log, stderr=log
            )
        try:
            async with httpx.AsyncClient(trust_env=False) as http:
                while True:
                    if process.returncode is not None:
                        raise SystemExit(f"traced up has ended, see {self.folder / 'service.log'}")
                    with contextlib.suppress(httpx.TransportError):
                        if (await http.get(f"{self.url}/ready")).status_code == 200:
                            break
                    await asyncio.sleep(0.5)
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


@dataclass
class Agent:
    """The agent: it serves a user of the desk through the router, and executes the calls that the model makes."""

    client: AsyncOpenAI
    place: Place

    async def serve(self, seeds: Iterable[int], name: str, *, feedback: bool) -> dict[int, bool]:
        """Serve tasks, ``CONCURRENCY`` at once, and return success by task."""
        desk = target(load_settings(self.place.folder / "desk", {"target.name": "desk"}))
        outcomes: dict[int, bool] = {}
        async with desk.source() as source, asyncio.TaskGroup() as group:
            slots = asyncio.Semaphore(CONCURRENCY)

            async def serve_task(seed: int) -> None:
                async with slots:
                    episode = source.episode()
                    try:
                        outcomes[seed] = await self._converse(episode, seed, f"{name}-{seed}")
                    finally:
                        await episode.close()
                    if feedback:
                        await self._rate(f"{name}-{seed}", outcomes[seed])

            for seed in seeds:
                group.create_task(serve_task(seed))
        return outcomes

    async def _converse(self, episode: Episode, seed: int, name: str) -> bool:
        task = await episode.reset(seed)
        messages: list[Message] = [{"role": "system", "content": task.system}, *task.messages]
        for _ in range(MAX_TURNS):
            answer = await self.client.chat.completions.create(
                model="auto",
                messages=cast(Any, messages),
                tools=cast(Any, task.tools),
                temperature=TEMPERATURE,
                extra_headers={"X-Traced-Conversation": name},
            )
            message = answer.choices[0].message.model_dump(exclude_none=True)
            step = await episode.step(message)
            messages += [message, *step.messages]
            if step.done:
                break
        return (await episode.score()).success

    async def _rate(self, name: str, success: bool) -> None:
        body = {"conversation_id": name, "score": float(success)}
        async with httpx.AsyncClient(trust_env=False) as http:
            (await http.post(f"{self.place.url}/v1/feedback", json=body)).raise_for_status()


def new_place(folder: Path, options: argparse.Namespace) -> Place:
    """Return the place of a run, with the settings of a user who has no simulator."""
    port = free_port()
    settings: dict[str, Any] = {
        "target.name": TARGET,
        "target.kind": "recorded",
        "target.held_out": 0.1,
        "seed": options.seed,
        "serving.with_service": True,
        "serving.port": port,
        "serving.silence_s": 2,
        "collect.episodes": options.conversations,
        "triggers.trajectories": options.conversations if options.cycles == 1 else 0,
        "promotion.steps": [0.5],
        # A benchmark trains on the machine that it is given, also beside other work.
        "devices.cpu_utilisation": 1.0,
        "devices.idle_s": 1.0,
        **dict(pair.split("=", 1) for pair in options.settings),
    }
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    return Place(folder, port, settings, env)


async def measure(folder: Path, options: argparse.Namespace, note: Any) -> dict[str, Any]:
    """Run all steps and return the figures."""
    started, place = time.monotonic(), new_place(folder, options)
    tasks = iter(TASKS)
    figures: dict[str, Any] = {"seed": options.seed, "conversations": options.conversations, "cycles": []}
    async with place.service(), AsyncOpenAI(base_url=f"{place.url}/v1", api_key="none", max_retries=5) as client:
        agent, paired = Agent(client, place), list(islice(tasks, options.paired))
        outcomes = [await agent.serve(paired, "paired-0", feedback=False)]
        note(f"{sum(outcomes[0].values())} of {len(paired)} paired tasks solved without adapters")
        for number in range(1, options.cycles + 1):
            figures["cycles"].append(await _cycle(agent, tasks, number, options, note))
            outcomes.append(await agent.serve(paired, f"paired-{number}", feedback=False))
            note(f"{sum(outcomes[-1].values())} of {len(paired)} paired tasks solved after cycle {number}")
            figures["cycles"][-1]["step"] = _gain(outcomes[-2], outcomes[-1])
    return figures | {
        "promoted": [name for cycle in figures["cycles"] for name in cycle["promoted"]],
        "success": [sum(row.values()) / len(paired) for row in outcomes],
        **_gain(outcomes[0], outcomes[-1]),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }


def _gain(earlier: dict[int, bool], later: dict[int, bool]) -> dict[str, Any]:
    """Return the paired difference of two runs of the same tasks."""
    gain = compare([Pair(str(seed), 0, earlier[seed], later[seed]) for seed in earlier])
    return {"gain": gain.difference, "ci": [gain.low, gain.high]}


async def _cycle(
    agent: Agent, tasks: Iterator[int], number: int, options: argparse.Namespace, note: Any
) -> dict[str, Any]:
    """Serve conversations with feedback, wait for the cycle of this number, and put its adapters on trial."""
    started, place = time.monotonic(), agent.place
    earlier_count = _outcome_count(await place.traced("status"))
    traffic = await agent.serve(islice(tasks, options.conversations), f"traffic-{number}", feedback=True)
    note(f"{sum(traffic.values())} of {len(traffic)} conversations with feedback succeeded")
    if options.cycles > 1:
        # A conversation has an outcome once it has been silent.
        await _status_when(place, lambda status: _outcome_count(status) >= earlier_count + len(traffic))
        await place.traced("cycle", "start")
    status = await _until_ended(place, number, ("waiting", *FINAL_STATES))
    waiting = list(status["waiting"])
    figures: dict[str, Any] = {"minutes": round((time.monotonic() - started) / 60, 1), "gated": waiting}
    figures |= {"success": sum(traffic.values()) / len(traffic), "promoted": [], "canary_conversations": 0}
    note(f"cycle {number}: waiting for a decision: {', '.join(waiting) or 'nothing'}")
    if not waiting:
        note(f"why: {json.dumps({key: status[key] for key in ('cycles', 'adapters', 'failures', 'blocked')})}")
        return figures
    for name in waiting:
        await place.traced("approve", name, "--policy", "shadow", "--yes")
    await _until_ended(place, number, FINAL_STATES)
    await agent.serve(islice(tasks, SHADOWED), f"shadowed-{number}", feedback=True)
    for name in waiting:
        await place.traced("approve", name, "--policy", "canary", "--yes")
    while figures["canary_conversations"] < options.canary:
        count = min(BATCH, options.canary - figures["canary_conversations"])
        await agent.serve(islice(tasks, count), f"canary-{number}", feedback=True)
        figures["canary_conversations"] += count
        states = await _traffic(place)
        note(f"{figures['canary_conversations']} conversations with canaries: {states}")
        if all("canary" not in states[name] for name in waiting):
            break
    states = await _traffic(place)
    return figures | {"traffic": states, "promoted": [name for name in waiting if states[name] == "live"]}


def _outcome_count(status: dict[str, Any]) -> int:
    """Return the number of conversations that have an outcome."""
    outcomes = status["router"]["by_target"].get(TARGET, {})
    return int(outcomes.get("success", 0) + outcomes.get("failure", 0))


async def _status_when(place: Place, condition: Any) -> dict[str, Any]:
    deadline = time.monotonic() + CYCLE_S
    while time.monotonic() < deadline:
        status = await place.traced("status")
        if condition(status):
            return status
        await asyncio.sleep(POLL_S)
    raise SystemExit(f"no end after {CYCLE_S:.0f} s: {json.dumps(status)}")


async def _until_ended(place: Place, number: int, ends: Sequence[str]) -> dict[str, Any]:
    """Return the status when this many cycles are in one of these states."""
    return await _status_when(place, lambda status: sum(cycle["state"] in ends for cycle in status["cycles"]) >= number)


async def _traffic(place: Place) -> dict[str, str]:
    """Return what each adapter does in traffic."""
    return {row["adapter"]: str(row["traffic"]) for row in (await place.traced("status"))["adapters"]}


def meets(figures: dict[str, Any]) -> bool:
    """Whether all aims are met."""
    return bool(
        len(figures["promoted"]) >= AIMS["promoted"]
        and figures["gain"] >= AIMS["gain"]
        and figures["ci"][0] > AIMS["ci_low_above"]
        and figures["minutes"] <= AIMS["minutes"] * len(figures["cycles"])
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit code 1 if an aim is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traffic_cycle", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=300, help="conversations with feedback before a cycle")
    parser.add_argument("--paired", type=int, default=150, help="tasks that are served before and after")
    parser.add_argument("--canary", type=int, default=1000, help="most conversations while canaries are undecided")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="settings", action="append", default=[], help="a setting of the service")
    parser.add_argument("--into", type=Path, help="folder of the run (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    options = parser.parse_args(arguments)

    def note(text: str) -> None:
        if not options.json:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    with contextlib.ExitStack() as stack:
        folder = options.into or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traced-traffic-")))
        folder.mkdir(parents=True, exist_ok=True)
        figures = asyncio.run(measure(folder, options, note))
    report = figures | {"aims": AIMS, "meets": meets(figures)}
    print(json.dumps(report) if options.json else json.dumps(report, indent=1))
    return 0 if report["meets"] else 1


if __name__ == "__main__":
    sys.exit(main())
