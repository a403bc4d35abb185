"""Small models with planted deficits, for ``benchmarks.planted --source models``, and their conversations on the desk.

A model is the bundled one, taught the plant by 300 further steps of pre-training on demonstrations with that fault;
it is kept under ``build/planted`` by plant and parent weights, so a second run loads it. Its conversations are sampled
at temperature 1 on the train split, as ``traced collect`` samples them.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import torch

from scripts.pretraining.desk_corpus import desk
from scripts.pretraining.pretrain import pretrain
from store.types import Trajectory
from tests.local_source import LocalSource
from traced.inference.chat_format import ChatFormat
from traced.inference.embedded.engine import Engine
from traced.inference.model_files import BUNDLED, ModelFiles, load_model
from traced.inference.policies import InProcessPolicy
from traced.rollouts.episodes import EpisodeJob, Limits, run_episodes
from traced.targets.desk import SPLITS, Desk

FOLDER = Path("build") / "planted"
STEPS = 300


def converse(plant: tuple[str, ...], conversations: int, seed: int) -> list[Trajectory]:
    """Conversations of the model with this plant; it is trained first where it does not exist."""
    torch.set_num_threads(2)
    return asyncio.run(_play(model_folder(plant), conversations, seed))


def model_folder(plant: tuple[str, ...]) -> Path:
    """The folder of the model with this plant."""
    parent = hashlib.sha256((BUNDLED / "model.safetensors").read_bytes()).hexdigest()
    key = hashlib.sha256(json.dumps([plant, parent, STEPS]).encode()).hexdigest()[:12]
    folder = FOLDER / f"{'+'.join(plant)}-{key}"
    if not (folder / "pretraining.json").exists():  # written last
        pretrain(folder, desk(plant), seed=0, steps=STEPS, init=BUNDLED)
    return folder


async def _play(folder: Path, conversations: int, seed: int) -> list[Trajectory]:
    model, tokenizer = load_model(ModelFiles(folder.name, folder))
    engine = Engine(model, tokenizer)
    engine.start()
    try:
        async with aclosing(
            _episodes(InProcessPolicy(engine, ChatFormat(tokenizer)), folder.name, conversations, seed)
        ) as episodes:
            return [trajectory async for trajectory in episodes]
    finally:
        engine.stop()


def _episodes(policy: InProcessPolicy, model: str, conversations: int, seed: int) -> AsyncGenerator[Trajectory]:
    first = SPLITS["train"].start + seed * conversations
    jobs = [EpisodeJob(task, 0, "train", str(task)) for task in range(first, first + conversations)]
    source = LocalSource("desk", Desk)
    return run_episodes(
        source, jobs, policy, Limits(concurrency=64), model=model, temperature=1.0, cycle_id=None, base_seed=seed
    )
