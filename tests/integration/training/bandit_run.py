"""Run the job in FILE on the bandit as its own process: ``python -m tests.integration.training.bandit_run FILE``.

The log-probs of the samples are not those of the model, so that ratios differ from 1 and the loss is not about 0. With
``SCRIPTED`` as its server, a job gets the same samples whatever its model is. With real servers nothing is changed.
"""

import contextlib
import dataclasses
import math
import os
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from sandbox.contract import Score
from tests.local_source import LocalSource
from tests.unit.training.bandit import Bandit
from tests.unit.training.tiny import tokenizer
from traced.inference.generation import Generation, Request
from traced.processes.child_process import start
from traced.training import grpo, memory, metrics, process, processes, sampling
from traced.training import trainer as trainer_module
from traced.training.adapter_folder import save_adapter
from traced.training.drift import judge
from traced.training.job import TrainingJob, read_job
from traced.training.metrics import Metrics
from traced.training.policy_engine import EngineLoad
from traced.training.rollout_function import RolloutFunction

SCRIPTED = "scripted:"
MODULE = "tests.integration.training.bandit_run"
LITTLE_MEMORY = 100  # tokens of a pass that fit into the memory of the processes besides the first


class ScriptedEngine:
    """Samples by the seed of the request alone, and keeps the adapters of the iterations in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.load = EngineLoad()
        self._folder = folder
        self._letters: list[int] = [tokenizer().encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz"]

    def begin(self, conversations: Iterable[str]) -> None:
        """Do nothing."""

    def end(self, conversation: str) -> None:
        """Do nothing."""

    async def generate(self, request: Request, conversation: str) -> Generation:
        draw = random.Random(request.sampling.seed)
        ids = draw.choices(self._letters, k=draw.randint(1, request.sampling.max_tokens))
        # About those of a random model of 322 tokens.
        return Generation(ids, [draw.uniform(-6.3, -5.3) for _ in ids], "length")

    def synchronise(self, peft_model: Any, iteration: int) -> None:
        save_adapter(peft_model, self._folder / str(iteration))

    def begin_update(self) -> None:
        """Do nothing."""

    def end_update(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PartlyHopeless(Bandit):
    """Scores 0 on the seeds of the iterations in the job's tag ``hopeless``, which are counted from 1."""

    def __init__(self, job: TrainingJob) -> None:
        super().__init__()
        iterations = job.tags.get("hopeless", "").split()
        self.hopeless = {seed for iteration in iterations for seed in job.group_seeds(int(iteration) - 1)}

    def score(self) -> Score:
        return Score(0.0, False) if self.seed in self.hopeless else super().score()


def shift_logprobs(engine: Any) -> None:
    generate = engine.generate

    async def shifted(request: Request, conversation: str) -> Generation:
        generation = await generate(request, conversation)
        # The shift of a request depends on nothing but the request, whatever the order of the answers.
        shift = torch.Generator().manual_seed((request.sampling.seed or 0) % 2**63)
        logprobs = [p + float(torch.rand((), generator=shift)) - 0.5 for p in generation.logprobs]
        return dataclasses.replace(generation, logprobs=logprobs)

    engine.generate = shifted


@contextlib.contextmanager
def planned_samples(job: TrainingJob) -> Iterator[None]:
    """Give trainings in this process the samples of the job's engine, as the module's docstring says."""
    build, engine = grpo.build_trainer, sampling._policy_engine

    def build_watched(*arguments: Any) -> Any:
        trainer = build(*arguments)
        base = [weight for weight in trainer.model.parameters() if not weight.requires_grad]
        local = sum(weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel() for weight in base)
        print("base weights:", local, "of", sum(weight.numel() for weight in base), flush=True)
        if isinstance(trainer.rollout_function, RolloutFunction) and not job.engine_urls:
            shift_logprobs(trainer.rollout_function.sampler.engine)
        return trainer

    def scripted(*arguments: Any) -> Any:
        return ScriptedEngine(job.out / "policy") if job.engine_urls == [SCRIPTED] else engine(*arguments)

    is_real = bool(job.engine_urls) and job.engine_urls != [SCRIPTED]
    with (
        patch.object(grpo, "build_trainer", build_watched),
        patch.object(sampling, "_policy_engine", scripted),
        # The other processes run this module too.
        patch.object(processes, "start", lambda arguments, **options: start(["-m", MODULE, arguments[-1]], **options)),
        # The policy of a random model stays uncertain where its groups are equal.
        patch.object(metrics, "CERTAIN", math.inf),
        # An engine with such log-probs would be refused.
        patch.object(
            trainer_module, "judge", judge if is_real else lambda *rest: dataclasses.replace(judge(*rest), reason="")
        ),
    ):
        yield


def train(job: TrainingJob) -> list[Metrics]:
    """Run the job in this process."""
    rows: list[Metrics] = []

    def on_metric(iteration: Metrics) -> None:
        rows.append(iteration)
        print("iteration", iteration["iteration"], flush=True)

    with planned_samples(job):
        grpo.train(job, on_metric, lambda _: LocalSource("bandit", lambda: PartlyHopeless(job)))
    return rows


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = read_job(Path(sys.argv[1]))
    if "RANK" in os.environ:
        with (
            planned_samples(job),
            patch.object(memory.HostMeter, "start", lambda self: (0, 0)),
            patch.object(memory, "fitting_tokens", lambda sample: LITTLE_MEMORY),
        ):
            process.follow()
    else:
        train(job)


if __name__ == "__main__":
    main()
