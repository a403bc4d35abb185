"""One training run, in this process: from a job to an adapter directory.

Invariants: the base stays frozen; rollouts are strictly on-policy (``sampling_model``); the
adapter folder (PEFT layout) appears whole, after the last iteration, and ``result.json`` after it. Running a job again
continues from its newest checkpoint, bit for bit on one thread, or returns at once when it is finished. A run that is
asked to pause (``job.pause``) saves a checkpoint after the iteration at work and raises ``TrainingPaused``. A run whose
environment is solved (``job.solved_after``) is finished: groups without a failure give no gradient.

How it fails: ``TrainingError`` (see ``errors``); checkpoints stay, so that the same command carries on. Not covered:
more than one process or device; children (``supervise`` runs this module in one).

The model that rollouts sample from: the base with the adapter's current weights folded in, a copy of its own.

Why a copy: a folded layer is one matrix product where PEFT's takes three and a walk through Python, which for a small
model is half of a decode step; and the base under training is never merged and unmerged, so it cannot drift.

Invariants: after ``synchronise`` every weight is W + scale * B A from the pristine W, so errors do not add up and the
copy is on-policy up to float32 rounding. Not covered: adapters other than LoRA on linear layers. The copy costs the
base's memory once more.
"""

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig

from sandbox.episodes import EpisodeSource
from sandbox.errors import SandboxError
from traced.core.files import publish_file, publish_folder
from traced.inference.embedded.engine import Engine
from traced.inference.model_files import ModelFiles, load_model
from traced.training.errors import EnvironmentFailed, JobChangedError, TrainingPaused
from traced.training.job import TrainingJob, TrainingResult
from traced.training.metrics import Metrics, append, keep_until, solved, write_samples
from traced.training.rollouts import RolloutFunction, RolloutLimits, Sampler, TurnTemplate
from traced.training.trainer import GroupRelativeTrainer, newest_checkpoint


def sampling_copy(base: Any) -> Any:
    """A frozen copy of the base model in eval mode, made before PEFT and TRL change the original."""
    return copy.deepcopy(base).requires_grad_(False).eval()


@torch.no_grad()
def synchronise(trained: Any, sampled: Any) -> None:
    """Give ``sampled`` (from ``sampling_copy``) the weights of the PEFT model ``trained`` as they are now."""
    for name, layer in trained.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            folded = layer.get_base_layer().weight + layer.get_delta_weight("default")
            sampled.get_submodule(name).weight.copy_(folded)


OpenSource = Callable[[TrainingJob], AbstractAsyncContextManager[EpisodeSource]]


def train(job: TrainingJob, on_metric: Callable[[Metrics], None], open_source: OpenSource) -> TrainingResult:
    """Train the job's adapter, calling ``on_metric`` after every iteration of this call."""
    started = time.perf_counter()
    finished = _claim(job)
    if finished is not None and (finished.solved or finished.iterations >= job.iterations):
        return finished
    torch.set_num_threads(job.threads)
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    done = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    keep_until(job.metrics, done)
    # solved, and killed between its last checkpoint and its result: not one iteration more
    bounded = replace(job, iterations=done) if done and _solved(job) else job

    def record(metrics: Metrics) -> None:
        append(job.metrics, metrics)
        on_metric(metrics)

    with start_blocking_portal() as portal, _opened(portal, open_source(job)) as source:
        trainer = build_trainer(bounded, source, portal, record)
        trainer.add_callback(_EndsEarly(job))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    job.pause.unlink(missing_ok=True)
    reached = int(trainer.state.global_step)
    early = reached < job.iterations
    if early and not _solved(job):
        raise TrainingPaused(f"gave way after iteration {reached} of {job.iterations}")
    _publish(job, trainer)
    result = TrainingResult(str(job.adapter), reached, done, time.perf_counter() - started, solved=early)
    publish_file(job.out / "result.json", json.dumps(asdict(result)) + "\n")
    return result


class _EndsEarly(TrainerCallback):
    """Ends the run once the job's ``pause`` file is there, with a checkpoint, or once its environment is solved."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An iteration is over; its metrics are not there yet."""
        if self.job.pause.exists():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """An iteration's metrics are written."""
        if _solved(self.job):
            control.should_training_stop = True


def _solved(job: TrainingJob) -> bool:
    return job.solved_after > 0 and solved(job.metrics, job.solved_after)


def _claim(job: TrainingJob) -> TrainingResult | None:
    """Make the job's folder its own; its result if it was finished before. A different job there is refused."""
    mark = job.out / "fingerprint"
    if mark.exists() and mark.read_text(encoding="utf-8").strip() != job.fingerprint():
        raise JobChangedError(
            f"{job.out} holds the checkpoints of a different job (seed, environment, model or settings differ)",
            hint="train into another folder, or remove this one",
        )
    publish_file(mark, job.fingerprint() + "\n")
    publish_file(job.out / "job.json", job.to_json())
    result = job.out / "result.json"
    return TrainingResult(**json.loads(result.read_text(encoding="utf-8"))) if result.exists() else None


@contextmanager
def _opened(portal: BlockingPortal, source: AbstractAsyncContextManager[EpisodeSource]) -> Iterator[EpisodeSource]:
    """Enter the source on the portal's loop; what hinders it is the environment's failure, told in its own words."""
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(portal.wrap_async_context_manager(source))
        except SandboxError as error:
            raise EnvironmentFailed(str(error)) from error
        yield opened


def build_trainer(
    job: TrainingJob, source: EpisodeSource, portal: BlockingPortal, record: Callable[[Metrics], None]
) -> GroupRelativeTrainer:
    """The trainer, with an engine around a copy of its model to sample from; ``source`` lives on the portal's loop."""
    logging.set_verbosity_error()
    model, tokenizer = load_model(ModelFiles(Path(job.model_path).name, Path(job.model_path)))
    length = min(job.max_length, model.config.max_position_embeddings)
    limits = RolloutLimits(job.max_turns, length, job.max_tokens, job.step_timeout_s, job.temperature)
    sampled = sampling_copy(model)
    engine = Engine(sampled, tokenizer, max_batch=job.groups * job.rollouts, max_length=length)
    sampler = Sampler(source, engine.generate, TurnTemplate(tokenizer), portal.call, limits)

    def refresh(trained: Any) -> None:
        synchronise(trained, sampled)
        engine.reset()

    trainer = GroupRelativeTrainer(
        rollout_function=RolloutFunction(
            sampler, job.rollouts, job.seed, tokenizer.eos_token_id, refresh, partial(write_samples, job.samples)
        ),
        micro_batch_tokens=job.micro_batch_tokens,
        on_iteration=record,
        model=model,
        args=_arguments(job),
        train_dataset=_dataset(job),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=job.lora_r, lora_alpha=job.lora_alpha, target_modules=_linear_names(model), task_type="CAUSAL_LM"
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _dataset(job: TrainingJob) -> Any:
    """One row per group, in the order of the iterations; the prompt is the group's environment seed."""
    seeds = [seed for iteration in range(job.iterations) for seed in job.group_seeds(iteration)]
    return Dataset.from_dict({"prompt": [str(seed) for seed in seeds]})


def _arguments(job: TrainingJob) -> GRPOConfig:
    """The paper's settings (method, section 3) as TRL names them."""
    return GRPOConfig(
        output_dir=str(job.out / "checkpoints"),
        max_steps=job.iterations,
        per_device_train_batch_size=job.groups * job.rollouts,
        num_generations=job.rollouts,
        num_iterations=1,
        max_completion_length=job.max_length,
        temperature=job.temperature,
        loss_type="grpo",
        scale_rewards="group",
        beta=0.0,
        epsilon=job.clip,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=job.max_grad_norm,
        gradient_checkpointing=job.gradient_checkpointing,
        use_cpu=True,
        bf16=False,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        seed=job.seed,
        logging_steps=1,
        save_steps=job.checkpoint_every,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _linear_names(model: Any) -> list[str]:
    """Names of the base's linear layers, the LM head aside, sorted so that the adapter's config is reproducible."""
    head = model.get_output_embeddings()
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head}
    return sorted({name.rpartition(".")[2] for name in linear})


def _publish(job: TrainingJob, trainer: GroupRelativeTrainer) -> None:
    """Write the adapter whole; the base is named, not located, so that the folder can be moved and compared."""
    model = trainer.model
    config = model.peft_config["default"]
    config.base_model_name_or_path = Path(job.model_path).name
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set, whose order differs between processes

    def fill(folder: Path) -> None:
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink()  # PEFT's empty model card

    publish_folder(job.adapter, fill)
