"""Run one training job in this process, from the job to the adapter directory.

Invariants: the base stays frozen, and rollouts are on-policy (with ``overlap`` one iteration behind). The adapter
folder (PEFT layout) appears complete by one rename, and ``result.json`` after it. Running a job again continues from
its newest checkpoint, bit for bit on one thread.

How it fails: ``TrainingError``; checkpoints stay. Not covered: several processes or devices, adapters other than LoRA
on linear layers.
"""

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
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig

from sandbox.episodes import EpisodeSource
from sandbox.errors import SandboxError
from traced.core.files import publish_file, publish_folder
from traced.inference.model_files import ModelFiles, load_model
from traced.training.adapter_folder import save_adapter
from traced.training.errors import EnvironmentFailed, JobChangedError, TrainingPaused
from traced.training.job import TrainingJob, TrainingResult
from traced.training.metrics import Metrics, append, is_solved, truncate_after, write_samples
from traced.training.sampling import rollout_function
from traced.training.trainer import GroupRelativeTrainer, newest_checkpoint

OpenSource = Callable[[TrainingJob], AbstractAsyncContextManager[EpisodeSource]]


def train(job: TrainingJob, on_metric: Callable[[Metrics], None], open_source: OpenSource) -> TrainingResult:
    """Train the job's adapter; ``on_metric`` is called after every iteration of this call."""
    started = time.perf_counter()
    finished = _claim(job)
    if finished is not None and (finished.solved or finished.iterations >= job.iterations):
        return finished
    torch.set_num_threads(job.threads)
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    done = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    truncate_after(job.metrics, done)
    # A run that was killed after its environment was solved, before its result was written, must not train further.
    bounded = replace(job, iterations=done) if done and _is_solved(job) else job

    def record(metrics: Metrics) -> None:
        append(job.metrics, metrics)
        on_metric(metrics)

    with start_blocking_portal() as portal, _entered_source(portal, open_source(job)) as source:
        trainer = build_trainer(bounded, source, portal, record)
        trainer.add_callback(_EndsEarly(job))
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        finally:
            trainer.rollout_function.close()
    job.pause.unlink(missing_ok=True)
    last_iteration = int(trainer.state.global_step)
    ended_early = last_iteration < job.iterations
    if ended_early and not _is_solved(job):
        raise TrainingPaused(f"paused after iteration {last_iteration} of {job.iterations}")
    _publish(job, trainer)
    result = TrainingResult(str(job.adapter), last_iteration, done, time.perf_counter() - started, solved=ended_early)
    publish_file(job.out / "result.json", json.dumps(asdict(result)) + "\n")
    return result


class _EndsEarly(TrainerCallback):
    """Ends the run when a pause is requested (with a checkpoint) or the environment is solved."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check for a pause after an iteration; its metrics are not logged yet."""
        if self.job.pause.exists():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check whether the environment is solved once an iteration's metrics are logged."""
        if _is_solved(self.job):
            control.should_training_stop = True


def _is_solved(job: TrainingJob) -> bool:
    return job.solved_after > 0 and is_solved(job.metrics, job.solved_after)


def _claim(job: TrainingJob) -> TrainingResult | None:
    """Claim the job's folder; returns the result of a finished run. The folder of a different job is refused."""
    mark = job.out / "fingerprint"
    if mark.exists() and mark.read_text(encoding="utf-8").strip() != job.fingerprint():
        raise JobChangedError(
            f"{job.out} holds the checkpoints of a different job (seed, environment, model or settings differ)",
            hint="use another output folder, or remove this one",
        )
    # The fingerprint first: a folder with checkpoints but without one could be claimed by any job.
    publish_file(mark, job.fingerprint() + "\n")
    publish_file(job.out / "job.json", job.to_json())
    result = job.out / "result.json"
    return TrainingResult(**json.loads(result.read_text(encoding="utf-8"))) if result.exists() else None


@contextmanager
def _entered_source(
    portal: BlockingPortal, source: AbstractAsyncContextManager[EpisodeSource]
) -> Iterator[EpisodeSource]:
    """Enter the source on the portal's loop; a sandbox error becomes ``EnvironmentFailed``."""
    with ExitStack() as stack:
        try:
            episode_source = stack.enter_context(portal.wrap_async_context_manager(source))
        except SandboxError as error:
            raise EnvironmentFailed(str(error)) from error
        yield episode_source


def build_trainer(
    job: TrainingJob, source: EpisodeSource, portal: BlockingPortal, record: Callable[[Metrics], None]
) -> GroupRelativeTrainer:
    """Return the trainer with an engine around a copy of its model; ``source`` lives on the portal's loop."""
    logging.set_verbosity_error()
    model, tokenizer = load_model(ModelFiles(Path(job.model_path).name, Path(job.model_path)))
    trainer = GroupRelativeTrainer(
        rollout_function=rollout_function(
            job, source, portal, model, tokenizer, on_played=partial(write_samples, job.samples)
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
    # The callback prints metrics to stdout, which carries the job's reports.
    trainer.remove_callback(PrinterCallback)
    return trainer


def _dataset(job: TrainingJob) -> Any:
    """Return one row per group in iteration order; the prompt is the group's environment seed."""
    seeds = [seed for iteration in range(job.iterations) for seed in job.group_seeds(iteration)]
    return Dataset.from_dict({"prompt": [str(seed) for seed in seeds]})


def _arguments(job: TrainingJob) -> GRPOConfig:
    """Return the paper's settings (method, section 3) as TRL names them."""
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
    """Return the names of the base's linear layers without the LM head, sorted for a reproducible adapter config."""
    head = model.get_output_embeddings()
    linear = {name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head}
    return sorted({name.rpartition(".")[2] for name in linear})


def _publish(job: TrainingJob, trainer: GroupRelativeTrainer) -> None:
    """Publish the complete adapter folder."""
    publish_folder(job.adapter, partial(save_adapter, trainer.model))
