"""A process that works on a cycle with scripted stations: ``python -m tests.integration.scripted_cycle DIR [CUT]``.

The store, the graph, the checkpointer and the cycle's bookkeeping are real; a station only records a stage event. At
the station named by CUT ("train alpha") the process kills itself as ``kill -9`` does. Prints how the cycle stands.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from store.database import open_store, write_session
from store.records import CycleState, StageState
from store.repositories.cycles import set_cycle_state
from tests.desk import DESK
from traced.config.settings import Settings, load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.inference.model_files import ModelFiles
from traced.pipeline import runner
from traced.pipeline.context import Context, utc_now
from traced.pipeline.cycles import find_cycle
from traced.pipeline.stages import Stages

CAPABILITIES = ["alpha", "beta"]


def scripted_stages(context: Context, cut_at: str) -> Stages:
    def at(stage: str, capability: str | None = None) -> None:
        context.event(stage, StageState.STARTED, capability)
        if cut_at == f"{stage} {capability or ''}".strip():
            os.kill(os.getpid(), signal.SIGKILL)
        context.event(stage, StageState.FINISHED, capability)

    async def collect(cycle: str) -> None:
        at("collect")

    async def analyze(cycle: str) -> list[str]:
        at("analyze")
        return CAPABILITIES

    async def synthesize(cycle: str, capability: str, attempt: int) -> str:
        at("synthesize", capability)
        return f"{capability}-{attempt}"

    async def admit(cycle: str, capability: str, environment: str) -> bool:
        at("admit", capability)
        return True

    async def train(cycle: str, capability: str, environment: str) -> str:
        at("train", capability)
        return f"{capability}@v1"

    async def gate(cycle: str, adapter: str) -> bool:
        at("gate", adapter.partition("@")[0])
        return True

    async def waiting(cycle: str, adapters: list[str]) -> list[str]:
        decisions = Path(context.data_dir / "decisions")
        return [] if decisions.exists() else adapters

    async def promote(cycle: str, adapters: list[str]) -> list[str]:
        at("promote")
        return adapters

    async def evaluate(cycle: str, adapters: list[str]) -> None:
        at("evaluate")

    async def report(cycle: str) -> None:
        at("report")
        with context.write_session() as session:
            set_cycle_state(session, context.cycle_id, CycleState.FINISHED, at=utc_now())

    async def drop(cycle: str, capability: str, stage: str, reason: str) -> None:
        context.event(stage, StageState.FAILED, capability, reason=reason)

    async def requested_rounds(cycle: str, adapters: list[str]) -> dict[str, int]:
        return {}

    async def look(cycle: str, adapter: str, number: int) -> bool:
        return await gate(cycle, adapter)

    async def optimize_prompt(cycle: str, capability: str, environment: str) -> str:
        at("optimize-prompt", capability)
        return ""

    async def mixture(cycle: str, adapters: list[str]) -> list[list[str]]:
        return []

    async def compose(cycle: str, adapters: list[str], joint_versions: list[str]) -> list[str]:
        at("compose")
        return []

    async def attribute(cycle: str, capabilities: list[str]) -> list[str]:
        return capabilities

    return Stages(
        collect,
        analyze,
        attribute,
        synthesize,
        admit,
        train,
        gate,
        mixture,
        compose,
        waiting,
        promote,
        evaluate,
        report,
        drop,
        requested_rounds,
        look,
        optimize_prompt,
    )


def main(directory: Path, cut_at: str) -> None:
    settings: Settings = load_settings(directory)
    store = open_store(settings.store_url)
    with write_session(store) as session:
        cycle = find_cycle(session, settings, "scripted", at=utc_now())
    model = ModelFiles("scripted", directory)
    with Meter() as meter:
        progress = Progress(Console(stderr=True))
        context = Context(settings, store, DESK, model, cycle.id, progress, meter)
        runner.cycle_stages = lambda stage_runner: scripted_stages(stage_runner.context, cut_at)  # type: ignore[assignment, attr-defined]
        status = asyncio.run(runner.run_cycle(context, undecided))
    store.dispose()
    print(cycle.id, "finished" if status.finished else "waiting", *status.state.get("promoted", []))


def undecided(context: Context, adapters: Sequence[str]) -> bool:
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
