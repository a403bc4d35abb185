"""The way of one capability through the real graph: real synthesis and admission, the other stations do nothing.

``python -m tests.integration.synthesis.way DIR URL CUT CYCLE [KEY=VALUE]...`` does it in a process of its own, which
kills itself as ``kill -9`` does at CUT: "kept N" (the Nth reply is kept and nothing else), "saved N" (the Nth
environment is), "judging N" (the Nth admission has begun) or "-" (never). Prints how the way ended as JSON.
"""

import asyncio
import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sandbox import admission
from store.repositories.environments import save_environment
from tests.integration.synthesis.world import NAME, settings_for
from traced.cli.options import parse_pair
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.llm.connection import StoreLedger
from traced.pipeline import synthesize
from traced.pipeline.context import Context, open_context
from traced.pipeline.graph import advance, build_graph, checkpoints
from traced.pipeline.runner import InProcessRunner
from traced.pipeline.stages import Stages, cycle_stages

END_STATES = {"admitted": "", "reason": ""}


def run_with_context(
    cycle_id: str, directory: Path, url: str, overrides: Mapping[str, Any], work: Callable[..., Any]
) -> Any:
    """What ``work`` answers in the surroundings of the cycle's stages."""

    async def run() -> Any:
        settings = settings_for(directory, url, overrides)
        with Meter() as meter:
            async with open_context(settings, cycle_id, Progress(Console(stderr=True, quiet=True)), meter) as context:
                answer = work(context)
                return await answer if asyncio.iscoroutine(answer) else answer

    return asyncio.run(run())


async def walk(context: Context) -> dict[str, str]:
    """How the capability's way ends: the admitted environment, or why there is none."""
    finished = dict(END_STATES)

    async def nothing(*_: Any) -> Any:
        return []

    async def question(cycle_id: str, adapters: list[str]) -> dict[str, int]:
        return {}

    async def analyze(cycle_id: str) -> list[str]:
        return [NAME]

    async def attribute(cycle_id: str, capabilities: list[str]) -> list[str]:
        return capabilities

    async def train(cycle_id: str, capability: str, environment: str) -> str:
        finished["admitted"] = environment
        return f"{capability}@v1"

    async def gate(cycle_id: str, adapter: str) -> bool:
        return False

    async def drop(cycle_id: str, capability: str, stage: str, reason: str) -> None:
        finished["reason"] = f"{stage}: {reason}"

    real = cycle_stages(InProcessRunner(context))
    other_items: dict[str, Any] = {field.name: nothing for field in dataclasses.fields(Stages)}
    stages = Stages(**{**other_items, "synthesize": real.synthesize, "admit": real.admit, "analyze": analyze})
    stages = dataclasses.replace(
        stages, attribute=attribute, train=train, gate=gate, drop=drop, requested_rounds=question
    )
    async with checkpoints(context.data_dir, context.settings.store_url) as saver:
        graph = build_graph(stages, saver, attempts=context.settings.synthesis.max_environments)
        await advance(graph, context.cycle_id)
    return finished


def cut_at(stop_point: str) -> None:
    """Have this process killed at a point of its way."""
    subject, _, number = stop_point.partition(" ")
    passed: Counter[str] = Counter()

    def at(point: str) -> None:
        passed[point] += 1
        if subject == point and passed[point] == int(number):
            os.kill(os.getpid(), signal.SIGKILL)

    def next_step(point: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def working(*values: Any, **names: Any) -> Any:
            answer = work(*values, **names)
            at(point)
            return answer

        return working

    StoreLedger.keep = next_step("kept", StoreLedger.keep)  # type: ignore[method-assign]
    synthesize.save_environment = next_step("saved", save_environment)  # type: ignore[attr-defined]
    judge = admission.admit

    async def judge_file(*values: Any, **names: Any) -> Any:
        at("judging")
        return await judge(*values, **names)

    admission.admit = judge_file


if __name__ == "__main__":
    directory, url, stop_point, cycle, *pairs = sys.argv[1:]
    cut_at(stop_point)
    print(json.dumps(run_with_context(cycle, Path(directory), url, dict(map(parse_pair, pairs)), walk)))
