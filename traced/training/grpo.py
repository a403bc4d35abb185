"""Run one training job in this process, from the job to the adapter directory.

Invariants: the base stays frozen, and rollouts are on-policy (with ``overlap`` one iteration behind). The adapter
folder (PEFT layout) appears complete by one rename, and ``result.json`` after it. Running a job again continues from
its newest checkpoint, bit for bit on one thread.

Precision: on a GPU the base is loaded in bfloat16, PEFT creates the adapter in float32 (``autocast_adapter_dtype``),
and accelerate runs the passes under autocast; AdamW's moments follow the adapter. On a CPU everything is float32.

How it fails: ``TrainingError``; checkpoints stay. Not covered: adapters other than LoRA, several machines.
"""

import importlib.util
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from anyio.from_thread import BlockingPortal, start_blocking_portal
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils.logging import set_verbosity_error
from trl import GRPOConfig

from sandbox.episodes import EpisodeSource
from sandbox.errors import SandboxError
from traced.core.files import publish_file, publish_folder
from traced.inference.chat_format import ChatFormat
from traced.inference.engine_sleep import EngineSleep
from traced.inference.errors import ModelError
from traced.inference.model_files import ModelFiles, load_model
from traced.training.adapter_folder import save_adapter
from traced.training.errors import (
    EnvironmentFailed,
    JobChangedError,
    JobError,
    TrainingPaused,
    no_room_beside_engine,
)
from traced.training.footprint import MetaModel
from traced.training.job import OpenSource, TrainingJob, TrainingResult
from traced.training.lora import lora_config
from traced.training.memory import GpuMeter, HostMeter, PassSize
from traced.training.metrics import (
    Metrics,
    append,
    end_shares,
    is_solved,
    read_metrics,
    stall,
    truncate_after,
    write_samples,
)
from traced.training.open_seeds import OpenSeeds
from traced.training.policy_engine import engine_clients
from traced.training.processes import other_processes
from traced.training.recovery import Recoveries
from traced.training.rollouts import Rollout
from traced.training.sampling import rollout_function
from traced.training.teachers import begin_with
from traced.training.tracking import check_trackers, trackers
from traced.training.trainer import GroupRelativeTrainer, newest_checkpoint
from traced.training.validation import Validations

FLASH_ATTENTION = "flash_attention_2"
LONGEST_ROLLOUTS_S = 24 * 3600
log = logging.getLogger(__name__)


def train(job: TrainingJob, on_metric: Callable[[Metrics], None], open_source: OpenSource) -> TrainingResult:
    """Train the job's adapter; ``on_metric`` is called after every iteration of this call."""
    started = time.perf_counter()
    finished = _claim(job)
    if finished is not None and (finished.solved or finished.stalled or finished.iterations >= job.iterations):
        return finished
    check_device(job)
    check_trackers(job)
    torch.set_num_threads(job.threads)
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    done = _checkpoint_iteration(job)
    truncate_after(job.metrics, done)
    Validations(job).forget_after(done)
    OpenSeeds(job).forget_after(done)
    recoveries = Recoveries(job)
    recoveries.forget_after(done)
    # A run that was killed after it ended early, before its result was written, must not train further.
    has_ended = done > 0 and (bool(_stall(job)) or _is_solved(job))
    bounded = replace(recoveries.current(), iterations=done if has_ended else job.iterations)

    def record(metrics: Metrics) -> None:
        if job.validate_every:
            metrics |= {"validation_episodes": Validations(job).episodes}
        if job.recoveries:
            metrics |= {"recoveries": len(recoveries.all())}
        append(job.metrics, metrics)
        on_metric(metrics)
        if job.validate_every:
            Validations(job).prune(_checkpoint_iteration(job), recoveries)

    with (
        start_blocking_portal() as portal,
        _entered_source(portal, open_source(job)) as source,
        trackers(job) as tracker_callbacks,
        other_processes(bounded),
    ):
        trainer = build_trainer(bounded, source, portal, record)
        recovering = [_GoesBack(job, trainer, recoveries)] if job.recoveries else []
        for callback in (*tracker_callbacks, *recovering, _EndsEarly(job), *_process_callbacks(job, trainer)):
            trainer.add_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            last_iteration = int(trainer.state.global_step)
            ended_early = last_iteration < job.iterations
            is_solved_early, stalled = ended_early and _is_solved(job), _stall(job) if ended_early else ""
            if ended_early and not is_solved_early and not stalled:
                raise TrainingPaused(f"paused after iteration {last_iteration} of {job.iterations}")
            if trainer.rollout_function is not None:
                trainer.rollout_function.validate(trainer.model, last_iteration)
        finally:
            if trainer.rollout_function is not None:
                trainer.rollout_function.close()
            job.pause.unlink(missing_ok=True)
    policy = _publish(job, trainer, last_iteration)
    seconds = time.perf_counter() - started
    result = TrainingResult(
        str(job.adapter),
        last_iteration,
        done,
        seconds,
        solved=is_solved_early,
        stalled=stalled,
        policy=policy,
        recoveries=[recovery.message for recovery in recoveries.all()],
        validation_episodes=Validations(job).episodes,
    )
    publish_file(job.out / "result.json", json.dumps(asdict(result)) + "\n")
    # Only now: a run that is killed before it must not publish another policy.
    Validations(job).drop()
    return result


def follow(job: TrainingJob) -> None:
    """Train as one of the other processes of a job with several: the first process decides and publishes."""
    torch.set_num_threads(job.threads)
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    trainer = build_trainer(job, None, None, lambda _: None)
    recovering = [_GoesBack(job, trainer, None)] if job.recoveries else []
    for callback in (*recovering, *_process_callbacks(job, trainer)):
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def check_device(job: TrainingJob) -> None:
    """Raise ``JobError`` if this machine lacks what the job trains on."""
    if job.attention == FLASH_ATTENTION and importlib.util.find_spec("flash_attn") is None:
        raise JobError(
            f"attention is {job.attention!r}, and flash-attn is not installed", hint="pip install flash-attn"
        )
    if job.shard:
        _check_shard(job)
    if job.device == "cpu":
        return
    visible = f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
    if not torch.cuda.is_available():
        raise JobError(
            f"the job trains on a GPU (devices.train_on), and torch {torch.__version__} has none here; {visible}",
            hint='nvidia-smi; or set devices.train_on = "cpu"',
        )
    if job.processes > torch.cuda.device_count():
        raise JobError(
            f"the job has {job.processes} processes, one per GPU, and sees {torch.cuda.device_count()} GPUs; {visible}",
            hint="lease as many GPUs as the training has processes (devices.train_on)",
        )


def _check_shard(job: TrainingJob) -> None:
    if not job.engine_urls:
        raise JobError(
            "shard is set, and the embedded engine needs all weights of the base in the trainer's first process",
            hint='engine.backend = "vllm" (an engine of its own), or training.shard = false',
        )
    if not MetaModel(job).can_be_split:
        raise JobError(
            f"shard is set, and transformers cannot split the layers of the model in {job.model_path}",
            hint="training.shard = false, or another model (model.spec)",
        )


class _SharedControl(TrainerCallback):
    """Saves and ends in all processes of a run when the first one does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over what the first process has decided after the iteration."""
        self._share(control)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over what the first process has decided after it has seen the metrics."""
        self._share(control)

    def _share(self, control: Any) -> None:
        decisions = [control.should_save, control.should_training_stop]
        control.should_save, control.should_training_stop = broadcast_object_list(decisions)


class _GoesBack(TrainerCallback):
    """Goes back to the best policy in all processes of a run when it has collapsed; the first one decides.

    Args:
        recoveries: Those of the run; None in every process but the first.
    """

    def __init__(self, job: TrainingJob, trainer: GroupRelativeTrainer, recoveries: Recoveries | None) -> None:
        self.job = job
        self.trainer = trainer
        self.recoveries = recoveries
        self.validations = Validations(job)

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Decide after each iteration, before its checkpoint."""
        recovery = self.recoveries.decide(self.validations.all()) if self.recoveries is not None else None
        [recovery] = broadcast_object_list([recovery])
        if recovery is not None:
            log.warning(recovery.message)
            folder = self.validations.adapter(recovery.policy)
            self.trainer.go_back(folder, recovery.applied(self.job))


class _WakesEngine(TrainerCallback):
    """Wakes up the engine once the model is loaded, and after each step of the optimizer."""

    def __init__(self, trainer: GroupRelativeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wake it up before the first adapter is loaded."""
        self.trainer.wake_engine()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wake it up before its next adapter is loaded, or before the training ends."""
        self.trainer.wake_engine()


def _process_callbacks(job: TrainingJob, trainer: GroupRelativeTrainer) -> list[TrainerCallback]:
    """Return the callbacks of every process; they are called in the same order, because processes wait in them."""
    return [_SharedControl(), *([_WakesEngine(trainer)] if job.engine_sleeps else [])]


class _EndsEarly(TrainerCallback):
    """Ends the run when a pause is requested (with a checkpoint) or nothing is left to learn; fails a hopeless one."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check for a pause after an iteration; its metrics are not logged yet."""
        if self.job.pause.exists():
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Check whether the run is solved, stalled or hopeless, once an iteration's metrics are logged."""
        if _is_solved(self.job) or _stall(self.job):
            control.should_training_stop = True


def _checkpoint_iteration(job: TrainingJob) -> int:
    """Return after how many iterations the run would be resumed now."""
    checkpoint = newest_checkpoint(job.out / "checkpoints")
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _is_solved(job: TrainingJob) -> bool:
    return job.solved_after > 0 and is_solved(job.metrics, job.solved_after)


def _stall(job: TrainingJob) -> str:
    return stall(read_metrics(job.metrics), rollouts=job.rollouts, start=Recoveries(job).last_iteration)


def _claim(job: TrainingJob) -> TrainingResult | None:
    """Claim the job's folder; returns the result of a finished run. The folder of a different job is refused."""
    mark, fingerprint = job.out / "fingerprint", job.fingerprint()
    if mark.exists() and mark.read_text(encoding="utf-8").strip() != fingerprint:
        raise JobChangedError(
            f"{job.out} holds the checkpoints of a different job (seed, environment, model or settings differ)",
            hint="use another output folder, or remove this one",
        )
    # The fingerprint first: a folder with checkpoints but without one could be claimed by any job.
    publish_file(mark, fingerprint + "\n")
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
    job: TrainingJob,
    source: EpisodeSource | None,
    portal: BlockingPortal | None,
    record: Callable[[Metrics], None],
) -> GroupRelativeTrainer:
    """Return the trainer, with an engine around a copy of its model.

    Args:
        job: The job.
        source: Lives on the portal's loop; both are None in every process but the first.
        portal: Runs the episodes.
        record: Is called with the metrics of every iteration, in the first process.
    """
    set_verbosity_error()
    arguments = _arguments(job)
    device = str(arguments.device)
    if job.engine_sleeps:
        _leave_device_to_model(job, portal)
    files = ModelFiles(Path(job.model_path).name, Path(job.model_path))
    try:
        model, tokenizer = load_model(
            files,
            dtype=job.dtype,
            device=device,
            attention=None if job.attention == "auto" else job.attention,
            processes=job.processes if job.shard else 1,
        )
    except ModelError as error:
        if job.engine_sleeps and isinstance(error.__cause__, torch.OutOfMemoryError):
            raise no_room_beside_engine() from error
        raise
    rollout_record = _RolloutRecord(job, ChatFormat(tokenizer).stop_ids)
    function = None
    if source is not None and portal is not None:
        function = rollout_function(job, source, portal, model, tokenizer, on_played=rollout_record)
    trainer = GroupRelativeTrainer(
        rollout_function=function,
        pass_size=_pass_size(job),
        on_iteration=lambda metrics: record(metrics | rollout_record.end_shares),
        teachers=[Path(folder) for folder in job.teachers],
        model=model,
        args=arguments,
        train_dataset=_dataset(job),
        processing_class=tokenizer,
        peft_config=lora_config(job, model),
    )
    if job.start:
        begin_with(trainer.model, Path(job.start))
    # Transformers refuses checkpoints of a sharded model because its optimizer state would be in pieces. Here only the
    # frozen base is: each process has the whole adapter and its optimizer state.
    trainer.args.save_only_model = False
    # The callback prints metrics to stdout, which carries the job's reports.
    trainer.remove_callback(PrinterCallback)
    return trainer


def _leave_device_to_model(job: TrainingJob, portal: BlockingPortal | None) -> None:
    """Return once the engines sleep, in every process: the model may not fit beside an engine that is awake."""
    if portal is not None:
        portal.call(_begin_update, job)
    PartialState().wait_for_everyone()


async def _begin_update(job: TrainingJob) -> None:
    clients = engine_clients(job)
    try:
        await EngineSleep(clients, timeout_s=job.engine_silence_s).begin_update()
    finally:
        for client in clients:
            await client.aclose()


@dataclass
class _RolloutRecord:
    """Stores samples of an iteration's rollouts, and by what the rollouts ended."""

    job: TrainingJob
    end_tokens: Collection[int]
    end_shares: Metrics = field(default_factory=dict)

    def __call__(self, iteration: int, rollouts: list[Rollout]) -> None:
        write_samples(self.job.samples, iteration, rollouts)
        self.end_shares = end_shares(rollouts, self.end_tokens)


def _pass_size(job: TrainingJob) -> PassSize:
    meter = GpuMeter() if job.device == "cuda" else HostMeter()
    if job.shard:
        # A larger pass might not fit, and could not be repeated.
        return PassSize(job.micro_batch_tokens, job.micro_batch_tokens, meter, is_repeatable=False)
    # A larger pass is no faster on a CPU.
    return PassSize(job.micro_batch_tokens, None if job.device == "cuda" else job.micro_batch_tokens, meter)


def _dataset(job: TrainingJob) -> Any:
    """Return one row per group in iteration order; the prompt is the group's environment seed."""
    seeds = [seed for iteration in range(job.iterations) for seed in job.group_seeds(iteration)]
    return Dataset.from_dict({"prompt": [str(seed) for seed in seeds]})


def _arguments(job: TrainingJob) -> GRPOConfig:
    """Return the paper's settings (method, section 3) as TRL names them."""
    return GRPOConfig(
        output_dir=str(job.out / "checkpoints"),
        max_steps=job.iterations,
        per_device_train_batch_size=job.groups * job.rollouts // job.processes,
        num_generations=job.rollouts,
        num_iterations=1,
        max_completion_length=job.max_length,
        temperature=job.temperature,
        loss_type="grpo",
        scale_rewards="group",
        beta=job.kl,
        entropy_coef=job.entropy_bonus,
        epsilon=job.clip,
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=job.max_grad_norm,
        gradient_checkpointing=job.recomputes_activations,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=job.device == "cpu",
        bf16=job.dtype == "bfloat16",
        # The load-balancing loss of a mixture of experts is not part of the paper's objective.
        router_aux_loss_coef=0.0,
        # The other processes wait while the first one samples.
        ddp_timeout=LONGEST_ROLLOUTS_S,
        run_name=job.run_id,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        seed=job.seed,
        logging_steps=1,
        save_steps=job.checkpoint_every,
        save_only_model=job.shard,
        # The last one but one stays for the case that the last is incomplete.
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )


def _publish(job: TrainingJob, trainer: GroupRelativeTrainer, last_policy: int) -> int:
    """Publish the complete adapter folder, and return how many updates its policy has had."""
    best = Validations(job).publish_best(job.adapter) if job.validate_every else None
    if best is not None:
        return best.policy
    publish_folder(job.adapter, partial(save_adapter, trainer.model))
    return last_policy
