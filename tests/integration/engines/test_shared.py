"""The router and a stage on one vLLM: both use the router's server, and neither disturbs the other's adapters."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rich.console import Console

from benchmarks.engines.installation import vllm_python
from benchmarks.engines.signed_adapters import RANK, questions
from tests.integration.engines.conftest import LENGTH, LIVE, PLACES, Deployment
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from traced.config.settings import load_settings
from traced.core.progress import Progress
from traced.core.resources import Meter
from traced.pipeline.context import Context, open_context
from traced.pipeline.train import job_for, with_servers
from traced.training import grpo
from traced.training.device import ON_CPU
from traced.training.drift import Source
from traced.training.errors import TrainerDied
from traced.training.job import TrainingJob, folder_of_run
from traced.training.metrics import Metrics
from traced.training.policy_engine import NAME
from traced.training.process import train

USER = questions(1, seed=3)[0]
EVALUATED = "skill-0@v2"
OF_EVALUATION = f"{EVALUATED}+0123456789ab"
FOREIGN = "0123456789ab-i1-01234567"  # named like the adapter of a training, from another data directory


@asynccontextmanager
async def stage(deployment: Deployment) -> AsyncIterator[Context]:
    """A stage of a cycle, with the settings of the router."""
    settings = load_settings(
        deployment.installation.data_dir,
        {
            "model.spec": "bundled",
            "engine.backend": "vllm",
            "engine.vllm_python": str(vllm_python()),
            "engine.max_length": LENGTH,
            "serving.max_adapters": PLACES,
            "training.lora_r": RANK,
            "training.groups": 2,
            "training.rollouts": 2,
            "training.iterations": 2,
        },
    )
    async with open_context(settings, "c1", Progress(Console(file=StringIO())), Meter()) as context:
        yield context


async def training(context: Context, capability: str) -> TrainingJob:
    job = job_for(
        context.settings,
        run_id=f"c1/{capability}",
        capability=capability,
        source={"target": "desk", "split": "train"},
        model=context.model.path,
        out=folder_of_run(context.data_dir, "c1", capability, "0" * 64),
    )
    return await with_servers(context, job, ON_CPU)


def names_at(deployment: Deployment) -> list[str]:
    """The adapters that the engine itself lists."""
    return [m["id"] for m in httpx.get(f"{deployment.engine}/v1/models", trust_env=False).json()["data"]][1:]


def call(deployment: Deployment, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{deployment.engine}{path}", json=body, trust_env=False, timeout=60).raise_for_status()


def servers() -> list[int]:
    """The processes of vLLM below this one, however deep."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "traced.inference.vllm_child" in child.cmdline()]


async def test_a_killed_stages_adapters_are_unloaded_by_the_next_one(deployment: Deployment) -> None:
    if deployment.kind != "vllm":
        return

    def kill(metrics: Metrics) -> None:
        [child] = [p for p in psutil.Process().children() if "traced.training.process" in p.cmdline()]
        child.kill()

    async with stage(deployment) as context:
        with pytest.raises(TrainerDied):
            await train(await training(context, "killed"), kill)
        folder = shutil.copytree(
            deployment.installation.versions[EVALUATED].path, context.data_dir / "of an evaluation"
        )
    call(deployment, "/v1/load_lora_adapter", lora_name=OF_EVALUATION, lora_path=str(folder.absolute()))
    foreign = deployment.installation.versions[EVALUATED].path
    call(deployment, "/v1/load_lora_adapter", lora_name=FOREIGN, lora_path=str(Path(foreign).absolute()))
    abandoned = set(names_at(deployment)) - {*LIVE, FOREIGN, OF_EVALUATION}
    assert len(abandoned) == 1
    assert all(map(NAME.fullmatch, abandoned))
    async with stage(deployment) as context:
        await context.engine()
        assert set(names_at(deployment)) == {*LIVE, FOREIGN}
    call(deployment, "/v1/unload_lora_adapter", lora_name=FOREIGN)


async def test_a_stage_and_the_router_share_the_engine(deployment: Deployment) -> None:
    if deployment.kind != "vllm":
        return
    pids, has_ended = servers(), asyncio.Event()
    answers: list[tuple[str, str]] = []
    listed_names: set[str] = set()

    async def ask() -> None:
        """Use the router while the stage works."""
        while not has_ended.is_set():
            for name in LIVE:
                answers.append((name, await asyncio.to_thread(deployment.answer_text, USER, name)))
                listed_names.update(await asyncio.to_thread(names_at, deployment))

    rows: list[Metrics] = []
    async with stage(deployment) as context:
        engine = await context.engine()
        assert engine.urls == [deployment.engine]
        await context.serve(EVALUATED, Path(deployment.installation.versions[EVALUATED].path))
        body = {"model": engine.served_names[EVALUATED], "messages": USER, "temperature": 0, "max_tokens": 12}
        text = call(deployment, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
        assert deployment.installation.versions[EVALUATED].signs(text)
        job = await training(context, "shared")
        questioner = asyncio.create_task(ask())
        try:
            await asyncio.to_thread(grpo.train, job, rows.append, lambda _: LocalSource("bandit", Bandit))
        finally:
            has_ended.set()
            await questioner
    # The stage's adapters were there beside the router's, and answered for themselves: one for each of the two
    # iterations, and the last one, which plays the validation seeds.
    assert len(rows) == 2
    assert len([name for name in listed_names if NAME.fullmatch(name)]) == 3
    assert all(row["drift_source"] in (Source.ADAPTER, Source.NOT_DISTINGUISHABLE) for row in rows)
    assert all(deployment.installation.versions[name].signs(answer) for name, answer in answers)
    assert len(answers) > len(LIVE)
    # The stage has ended: the engine goes on, and holds what it held before.
    assert set(names_at(deployment)) == set(LIVE)
    assert servers() == pids
    assert deployment.http.get("/ready").is_success
    for name in LIVE:
        assert deployment.installation.versions[name].signs(deployment.answer_text(USER, name))
