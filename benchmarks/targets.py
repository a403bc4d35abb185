"""Replay the benchmarks that are targets: gold policies, doing nothing, speed, and a process that is killed.

    python -m benchmarks.targets [--tasks N] [--seconds 10] [--json] [NAME...]

For each target that is installed (``make targets``): the seconds to start it, the success rate of its gold policy and
of doing nothing on all tasks (or the first N), and gold episodes per second, one and 32 at once. Last, one of eight
episodes has its process killed with SIGKILL while it runs. Users that are models are replaced by a silent one.

The aims are the success rates that the benchmarks are known to have, and that the killed process costs one episode.
Exit code 1 when an aim is missed. Speeds are wall-clock. Doing nothing calls ``done`` where the agent has such a tool.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from sandbox.contract import Message, Task
from sandbox.wire import OraclePlay
from traced.config.settings import load_settings
from traced.core.errors import TracedError
from traced.targets.bundled import BUNDLED
from traced.targets.play import SilentUser, gold_play
from traced.targets.registry import target

# Successes of doing nothing, known from replays of the benchmarks themselves; the gold policy solves every task.
FLOORS = {
    "textworld:quest": 0,
    "tau2:telecom-solo": 0,
    "tau2:airline": 19,
    "tau2:retail": 7,
    "bfcl:multi-turn": 0,
    "bfcl:multi-turn-miss-param": 0,
    "bfcl:multi-turn-miss-func": 0,
    "bfcl:multi-turn-long-context": 0,
}
SEEDS = 40  # of each split of a target whose tasks are seeds
CONCURRENT = 32
VICTIMS = 8
TURNS = 64
END_TOOL = "done"


async def measure(name: str, data_dir: Path, tasks: int | None, seconds: float) -> dict[str, Any]:
    """Return the figures of one target; raises what it raises."""
    start = perf_counter()
    benchmark = await asyncio.to_thread(target, load_settings(data_dir, {"target.name": name}))
    started_s = perf_counter() - start
    async with benchmark.source(SilentUser()) as source:
        limit = SEEDS if benchmark.division.tasks is None else None
        seeds = [seed for split in benchmark.splits.values() for seed in split[:limit]][:tasks]
        slots = asyncio.Semaphore(os.cpu_count() or 1)

        async def play(seed: int, way: Callable[[Any, int], Awaitable[OraclePlay]]) -> bool:
            async with slots:
                return (await way(source, seed)).score.success

        gold = await asyncio.gather(*(play(seed, _gold) for seed in seeds))
        floor = await asyncio.gather(*(play(seed, _idle) for seed in seeds))
        speeds = {f"episodes_per_s_{count}": await _speed(source, seeds, count, seconds) for count in (1, CONCURRENT)}
        losses = await _lost_episodes(source, seeds)
    return {"start_s": started_s, "tasks": len(seeds), "gold": sum(gold), "floor": sum(floor), **speeds, "lost": losses}


async def _gold(source: Any, seed: int) -> OraclePlay:
    return await gold_play(source, seed, TURNS)


async def _idle(source: Any, seed: int) -> OraclePlay:
    """End the episode at once where the agent has a tool for that, else send empty messages until it ends."""
    episode = source.episode()
    try:
        task = await episode.reset(seed)
        done, turns = False, 0
        while not done and turns < TURNS:
            done, turns = (await episode.step(_nothing(task))).done, turns + 1
        return OraclePlay(task, [], done, await episode.score())
    finally:
        await episode.close()


def _nothing(task: Task) -> Message:
    if not any(tool["function"]["name"] == END_TOOL for tool in task.tools):
        return {"role": "assistant", "content": ""}
    call = {"id": "end", "type": "function", "function": {"name": END_TOOL, "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


async def _speed(source: Any, seeds: Sequence[int], count: int, seconds: float) -> float:
    """Return gold episodes per second with so many at once, over at least ``seconds``."""
    start = perf_counter()
    count_played = 0

    async def keep_playing(first: int) -> None:
        nonlocal count_played
        number = first
        while perf_counter() - start < seconds:
            await gold_play(source, seeds[number % len(seeds)], TURNS)
            count_played, number = count_played + 1, number + count

    await asyncio.gather(*(keep_playing(first) for first in range(count)))
    return count_played / (perf_counter() - start)


async def _lost_episodes(source: Any, seeds: Sequence[int]) -> int:
    """Kill the process of one of several running episodes; returns how many episodes that costs."""
    episodes = [source.episode() for _ in range(VICTIMS)]
    try:
        await asyncio.gather(*(episode.reset(seed) for episode, seed in zip(episodes, seeds, strict=False)))
        os.kill(episodes[0].pid, signal.SIGKILL)
        scores = await asyncio.gather(*(episode.score() for episode in episodes), return_exceptions=True)
        return sum(isinstance(score, TracedError) for score in scores)
    finally:
        for episode in episodes:
            await episode.close()


def verdict(name: str, figures: dict[str, Any], is_complete: bool) -> bool:
    """Whether the figures of a target are those that it is known for."""
    floor_is_right = figures["floor"] == FLOORS[name] if is_complete else figures["floor"] < figures["gold"]
    return figures["gold"] == figures["tasks"] and floor_is_right and figures["lost"] == 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the targets and print the figures."""
    parser = argparse.ArgumentParser(description="replay the benchmarks that are targets")
    parser.add_argument("names", nargs="*", metavar="NAME", help="targets; default: all that are installed")
    parser.add_argument("--tasks", type=int, help="tasks of each; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a measurement of speed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    names = options.names or [name for name, bundled in BUNDLED.items() if bundled.python.exists()]
    if not names:
        sys.exit("no benchmark is installed: make targets")
    if unknown := sorted({*names} - FLOORS.keys()):
        sys.exit(f"unknown target {unknown[0]}; known: {', '.join(FLOORS)}")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            row = asyncio.run(measure(name, Path(folder), options.tasks, options.seconds))
            row["meets"] = verdict(name, row, options.tasks is None)
            figures[name] = row
            if not options.json:
                print(
                    f"{name:30} start {row['start_s']:.1f} s  gold {row['gold']}/{row['tasks']}  nothing "
                    f"{row['floor']}/{row['tasks']}  {row['episodes_per_s_1']:.1f} and "
                    f"{row['episodes_per_s_32']:.1f} episodes/s with 1 and {CONCURRENT}  lost {row['lost']}"
                )
    meets = all(row["meets"] for row in figures.values())
    if options.json:
        aims = {"gold": "all", "floor": {name: FLOORS[name] for name in names}, "lost": 1}
        print(json.dumps({"targets": figures, "aims": aims, "meets": meets}))
    return 0 if meets else 1


if __name__ == "__main__":
    sys.exit(main())
