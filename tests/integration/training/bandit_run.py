"""Run the job in JOB.json on the bandit as its own process: ``python -m tests.integration.training.bandit_run``.

The engine's log-probs are shifted by up to half a nat, so that ratios differ from 1 and the loss is not about 0.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.unit.training.bandit import Bandit
from traced.inference.generation import Generation, Request
from traced.targets.registry import LocalSource
from traced.training import grpo
from traced.training import trainer as trainer_module
from traced.training.drift import Drift
from traced.training.job import read_job


def shift_logprobs(engine: Any) -> None:
    generate = engine.generate

    async def shifted(request: Request, conversation: str) -> Generation:
        generation = await generate(request, conversation)
        # The shift of a request depends on nothing but the request, whatever the order of the answers.
        shift = torch.Generator().manual_seed((request.sampling.seed or 0) % 2**63)
        logprobs = [p + float(torch.rand((), generator=shift)) - 0.5 for p in generation.logprobs]
        return dataclasses.replace(generation, logprobs=logprobs)

    engine.generate = shifted


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    build = grpo.build_trainer

    def build_shifted(*arguments: Any) -> Any:
        trainer = build(*arguments)
        assert trainer.rollout_function is not None
        shift_logprobs(trainer.rollout_function.sampler.engine)
        return trainer

    grpo.build_trainer = build_shifted  # type: ignore[assignment]
    # An engine with such log-probs would be refused.
    trainer_module.judge = lambda *arguments: Drift.unmeasured()  # type: ignore[attr-defined]
    job = read_job(Path(sys.argv[1]))
    grpo.train(
        job,
        lambda metrics: print("iteration", metrics["iteration"], flush=True),
        lambda _: LocalSource("bandit", Bandit),
    )


if __name__ == "__main__":
    main()
