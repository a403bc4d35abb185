"""The training stage: train one LoRA adapter with GRPO in a child process, and publish it as a version.

Invariants: a run is named by cycle, capability and environment; a repeated call continues from its checkpoints. A
version is in the store once its files are on disk. A person's stop is an event of this stage, stored before anything
is stopped; from then on nobody begins or continues a training of that capability in that cycle, and the first
decision stands.

How it fails: a broken environment, one that teaches nothing or a person's stop ends the capability
(``CapabilityError``); Docker, disk and process failures stop the cycle, which continues from the last checkpoint.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from sqlmodel import Session

from sandbox import docker_engine
from sandbox.user import asks_for_model
from store.records import AdapterVersion, IterationMetrics, RunState, StageEvent, StageState, TrainingRun
from store.repositories.adapters import (
    START_VERSION,
    get_adapter,
    list_adapters,
    list_training_runs,
    save_adapter,
    save_iterations,
    save_training_run,
    set_training_state,
)
from store.repositories.capabilities import get_capability
from store.repositories.cycles import list_stage_events, save_stage_event
from store.repositories.environments import get_environment
from traced.config.settings import Settings
from traced.core.errors import CapabilityError, TracedError
from traced.core.files import flush, publish_file
from traced.core.gpus import gpu_ids
from traced.core.location import PASSWORD_VARIABLE, URL_VARIABLE
from traced.core.ownership import sandbox_owner
from traced.core.seeds import derive_seed
from traced.inference.adapter_base import record_base
from traced.pipeline.context import Context
from traced.pipeline.mixture import DISTILLED, MIXTURE, TRAININGS, members_of, shape_mismatch, sound
from traced.registry.publication import publish
from traced.rollouts.step_limit import step_timeout_s, user_wait_s
from traced.routing.composition import MERGED, capability_of
from traced.training.device import ON_CPU, TrainingDevice, training_device
from traced.training.errors import EnvironmentFailed, NothingToLearn
from traced.training.job import TrainingJob, TrainingResult, folder_of_run
from traced.training.metrics import Metrics, read_metrics
from traced.training.process import train as run_job

TRAIN = "train"  # the stage
STOPPED_BY = "stopped_by"  # key in its event: the person who stopped it
TRAINING_SEEDS = (0, 100_000)  # seeds of a synthetic environment; gate, routers and prompts use others


@dataclass(frozen=True)
class TrainingStop:
    """A person's decision to stop the training of a capability."""

    actor: str
    at: datetime
    reason: str

    @property
    def message(self) -> str:
        """Return the reason that the capability ends with."""
        return f"{self.actor} stopped the training" + (f": {self.reason}" if self.reason else "")


def stop(session: Session, run: TrainingRun, *, actor: str, at: datetime, reason: str = "") -> TrainingStop:
    """Record that a person stopped this run and its capability's training in this cycle."""
    earlier = find_stop(session, run.cycle_id, run.capability)
    if earlier is not None:
        return earlier
    detail = {"run": run.id, STOPPED_BY: actor, "reason": reason}
    save_stage_event(session, StageEvent(run.cycle_id, TRAIN, StageState.STARTED, at, run.capability, detail))
    return TrainingStop(actor, at, reason)


def find_stop(session: Session, cycle_id: str, capability: str) -> TrainingStop | None:
    """Return the decision to stop a capability's training in a cycle, or None."""
    for event in list_stage_events(session, cycle_id):
        if (event.stage, event.capability) == (TRAIN, capability) and STOPPED_BY in event.detail:
            return TrainingStop(event.detail[STOPPED_BY], event.at, event.detail["reason"])
    return None


def check_not_stopped(session: Session, cycle_id: str, capability: str) -> None:
    """Raise ``CapabilityError`` if a person has stopped the training."""
    decision = find_stop(session, cycle_id, capability)
    if decision is not None:
        raise CapabilityError(decision.message)


async def train(context: Context, capability: str, environment: str) -> str:
    """Return the adapter version trained in the environment of this hash; starts, resumes or reuses its run."""
    run_id = f"{context.cycle_id}/{capability}/{environment[:12]}"
    total = context.settings.training.iterations
    with context.read_session() as session:
        check_not_stopped(session, context.cycle_id, capability)
        if capability == MIXTURE:
            total *= len(members_of(session, context.cycle_id, environment))
    title = f"several capabilities ({capability})" if capability in TRAININGS else capability
    with context.stage("train", f"Train an adapter for {title}", capability, total) as stage:
        name = trained_adapter(context, run_id)
        if name is None:
            device = training_device(context.settings.devices.train_on, context.settings.training.processes, os.environ)
            start = start_of_run(context, run_id, capability)
            job = job_in(context, run_id, capability, environment, device, start=start)
            job = await with_servers(context, job, device)
            _begin(context, job, environment, start)
            await _supervised(
                context, job, device, lambda metrics: stage.reach(int(metrics["iteration"]), _figure(metrics))
            )
            # Files first, row second: a crash in between leaves an unused folder, never a row without files.
            name = _publish(context, job, environment)
        stage.detail = {"adapter": name, "run": run_id}
    return name


def trained_adapter(context: Context, run_id: str) -> str | None:
    """Return the adapter version that a run produced, or None."""
    with context.read_session() as session:
        adapters = list_adapters(session, cycle_id=context.cycle_id)
    return next((adapter.name for adapter in adapters if adapter.training_run_id == run_id), None)


def training_folder(context: Context, capability: str, environment: str) -> Path:
    """Return the folder of the run in this environment, which holds its checkpoints."""
    return folder_of_run(context.data_dir, context.cycle_id, capability, environment)


def job_for(
    settings: Settings,
    *,
    run_id: str,
    capability: str,
    source: dict[str, str],
    model: Path,
    out: Path,
    device: TrainingDevice = ON_CPU,
    hint: str = "",
) -> TrainingJob:
    """Return a training job of the settings; its seed also depends on ``capability``.

    Args:
        hint: The text that a share of the rollouts see (``training.hint_share``, ``training.recovery_hint_share``);
            without one they see none.
    """
    training = settings.training
    return TrainingJob(
        run_id=run_id,
        capability=capability,
        environment_source=source,
        model_path=str(model),
        out_dir=str(out),
        seed=derive_seed(settings.seed, capability),
        iterations=training.iterations,
        solved_after=training.solved_after,
        groups=training.groups,
        rollouts=training.rollouts,
        lr=training.lr,
        lora_r=training.lora_r,
        lora_alpha=training.lora_alpha,
        clip=training.clip,
        kl=training.kl,
        entropy_bonus=training.entropy_bonus,
        max_turns=training.max_turns,
        max_length=training.max_length,
        max_tokens=settings.engine.max_tokens,
        temperature=training.temperature,
        seed_low=TRAINING_SEEDS[0],
        seed_high=TRAINING_SEEDS[1],
        open_share=training.open_share,
        hint=hint,
        hint_share=training.hint_share if hint else 0.0,
        # A target's solutions are not for training.
        demonstrations=min(training.demonstrations, training.rollouts - 1) if "environment" in source else 0,
        validate_every=training.validate_every,
        validation_seeds=training.validation_seeds,
        # Without validated policies there is none to go back to.
        recoveries=training.recoveries if training.validate_every else 0,
        recovery_lr=training.recovery_lr,
        recovery_temperature=training.recovery_temperature,
        recovery_kl=training.recovery_kl,
        recovery_entropy_bonus=training.recovery_entropy_bonus,
        recovery_hint_share=training.recovery_hint_share if hint else 0.0,
        validation_temperature=settings.engine.temperature,
        # Trainings at once share the threads of the machine.
        threads=max(1, settings.threads // training.at_once),
        limits=settings.sandbox.model_dump(),
        owner=sandbox_owner(settings.data_dir),
        device=device.kind,
        micro_batch_tokens=training.micro_batch_tokens,
        gradient_checkpointing={"auto": None, "on": True, "off": False}[training.gradient_checkpointing],
        attention=training.attention,
        processes=training.processes,
        shard=training.shard,
        report_to=list(training.report_to),
    )


async def with_servers(context: Context, job: TrainingJob, device: TrainingDevice) -> TrainingJob:
    """Return the job with the servers that sample its rollouts; the embedded engine samples in the trainer itself."""
    # Imported here because a status or a decision needs no engine.
    from traced.inference.start import backend, sleeps_during_updates

    engine_settings = context.settings.engine
    if backend(context.settings) == "embedded" and not engine_settings.urls:
        return job
    engine = await context.engine()
    return replace(
        job,
        engine_urls=engine.urls,
        engine_key_file=engine_settings.key_file,
        engine_silence_s=engine_settings.silence_s,
        engine_patience_s=engine.replicas.patience_s,
        engine_sleeps=sleeps_during_updates(context.settings, device.gpus, gpu_ids()),
        # Only an engine of its own can sample while the trainer updates.
        overlap=context.settings.training.overlap,
    )


def with_user(context: Context, job: TrainingJob, call_seconds: float) -> TrainingJob:
    """Return the job with the model of ``[target.user]`` as the user of its episodes."""
    settings = context.settings
    user = {
        "model": settings.target.user.model_dump(mode="json"),
        "data_dir": str(context.data_dir),
        "cycle_id": context.cycle_id,
    }
    return replace(job, user=user, step_timeout_s=step_timeout_s(call_seconds + user_wait_s(settings.target.user)))


def store_variables(context: Context) -> dict[str, str]:
    """Return the variables by which the trainer's process finds the store; its URL may hold a password."""
    section = context.settings.store
    variables = {URL_VARIABLE: section.url, PASSWORD_VARIABLE: section.password_file}
    return {name: value for name, value in variables.items() if value}


def job_in(
    context: Context, run_id: str, capability: str, environment: str, device: TrainingDevice, *, start: str = ""
) -> TrainingJob:
    """Return the job that trains in the environment of this hash.

    Args:
        capability: A capability of the cycle, or one of ``mixture.TRAININGS``, whose environment is a mixture.
        start: The adapter version whose weights it begins with, "" for new weights.
    """
    file = context.data_dir / "environments" / f"{environment}.py"
    hint = ""
    with context.read_session() as session:
        source_code = get_environment(session, environment).source_code
        members = members_of(session, context.cycle_id, environment) if capability in TRAININGS else []
        folders = [get_adapter(session, name).path for name in members]
        start_folder = get_adapter(session, start).path if start else ""
        training = context.settings.training
        if (training.hint_share or training.recovery_hint_share) and capability != DISTILLED:
            hint = get_capability(session, context.cycle_id, MERGED if members else capability).description
    if not file.exists():
        publish_file(file, source_code)
    job = job_for(
        context.settings,
        run_id=run_id,
        capability=capability,
        source={"environment": str(file)},
        model=context.model.path,
        out=training_folder(context, capability, environment),
        device=device,
        hint=hint,
    )
    ids = {"cycle": context.cycle_id, "capability": capability, "environment": environment, "model": context.model.name}
    job = replace(job, tags=ids, start=start_folder)
    if capability == MIXTURE:
        job = replace(job, iterations=job.iterations * len(members))
    elif capability == DISTILLED:
        job = replace(job, teachers=folders, kl=0.0, recovery_kl=0.0, demonstrations=0)
    return with_user(context, job, context.settings.sandbox.call_seconds) if asks_for_model(source_code) else job


def start_of_run(context: Context, run_id: str, capability: str) -> str:
    """Return the version that a run has begun with, or that a new run begins with; "" for new weights.

    Raises:
        CapabilityError: The version that the run has begun with is in quarantine by now.
    """
    with context.read_session() as session:
        runs = [run for run in list_training_runs(session, context.cycle_id) if run.id == run_id]
    if not runs or START_VERSION not in runs[0].config:
        return version_to_start_with(context, capability)
    start = str(runs[0].config[START_VERSION])
    if start and not sound(context, [start]):
        raise CapabilityError(f"the training began with {start}, which is in quarantine by now")
    return start


def version_to_start_with(context: Context, capability: str) -> str:
    """Return the adapter version whose weights a new training begins with, "" for new weights.

    With ``training.start = "warm"`` it is the live version of the capability, also where only a merge of it answers.
    Without one it is the version that answers everything, or what the router leaves to the base model: what the live
    system can do is not learnt a second time. Where that is a merge, the new version becomes one of its members, so it
    begins with new weights; so does a distillation.
    """
    # Imported here because the API imports this module, and routers load numpy.
    from traced.pipeline.incumbent import incumbent_of

    if context.settings.training.start == "fresh" or capability == DISTILLED:
        return ""
    incumbent = incumbent_of(context)
    composition = incumbent.composition
    capability = MERGED if capability == MIXTURE else capability
    names = [name for name in (*composition.models, *incumbent.live) if capability_of(name) == capability]
    broadest = composition.default or composition.model
    if composition.models and broadest and capability_of(broadest) != MERGED:
        names.append(broadest)
    for name in sound(context, dict.fromkeys(names)):
        with context.read_session() as session:
            folder = Path(get_adapter(session, name).path)
        reason = shape_mismatch(name, folder, context.settings.training)
        if not reason:
            return name
        context.progress.note(f"{capability} does not begin with {name}: {reason}")
    return ""


def _begin(context: Context, job: TrainingJob, environment: str, start: str) -> None:
    config = context.settings.training.model_dump() | {"seeds": list(TRAINING_SEEDS), "threads": job.threads}
    config |= {"device": job.device, START_VERSION: start}
    if job.capability in TRAININGS:
        with context.read_session() as session:
            config |= {"members": members_of(session, context.cycle_id, environment)}
    started = context.now()
    run = TrainingRun(
        id=job.run_id,
        cycle_id=context.cycle_id,
        capability=job.capability,
        environment_hash=environment,
        model=context.model.name,
        seed=job.seed,
        config=config,
        state=RunState.RUNNING,
        started_at=started,
    )
    with context.write_session() as session:
        save_training_run(session, run)
        set_training_state(session, job.run_id, RunState.RUNNING, at=started)


async def _supervised(
    context: Context, job: TrainingJob, device: TrainingDevice, on_metric: Callable[[Metrics], None]
) -> None:
    """Run the job's process and record how it ended, whatever the end."""
    try:
        result = await run_job(job, on_metric, device.trainer_variables | store_variables(context))
    except EnvironmentFailed as error:
        _end(context, job, RunState.FAILED, str(error))
        # If Docker itself is down, connect() raises EngineDown: not a failure of the environment.
        docker_engine.connect().close()
        raise CapabilityError(str(error)) from error
    except NothingToLearn as error:
        _end(context, job, RunState.FAILED, str(error))
        raise CapabilityError(str(error)) from error
    except TracedError as error:
        _end(context, job, RunState.INTERRUPTED, str(error))
        raise
    except BaseException as stop:
        _end(context, job, RunState.INTERRUPTED, type(stop).__name__)
        raise
    summary = run_summary(result, read_metrics(job.metrics))
    _end(context, job, RunState.FINISHED, summary, validation_episodes=result.validation_episodes)


def run_summary(result: TrainingResult, metrics: Iterable[Metrics] = ()) -> str:
    """Return how a finished run went back, why it ended early, and which policy it published if not the last one.

    Args:
        result: The finished run.
        metrics: Its iterations; they count the rollouts that the environment's solution replaced.
    """
    solutions = sum(int(row.get("demonstrations", 0)) for row in metrics)
    is_earlier = result.policy is not None and result.policy != result.iterations
    published = f"published is the policy after {result.policy} of {result.iterations} updates" if is_earlier else ""
    validated = f"{result.validation_episodes} validation episodes" if result.validation_episodes else ""
    solved_by_oracle = f"the environment's solution replaced {solutions} rollouts in updates" if solutions else ""
    return "; ".join(filter(None, [*result.recoveries, result.stalled, published, validated, solved_by_oracle]))


def _end(
    context: Context, job: TrainingJob, state: RunState, detail: str = "", *, validation_episodes: int = 0
) -> None:
    metrics = read_metrics(job.metrics)
    if metrics and validation_episodes:
        # With those of the last policy, which was validated after the last iteration.
        metrics[-1]["validation_episodes"] = validation_episodes
    figures = [IterationMetrics(job.run_id, int(values["iteration"]), dict(values)) for values in metrics]
    rollouts = len(metrics) * job.groups * job.rollouts
    with context.write_session() as session:
        save_iterations(session, figures)
        set_training_state(session, job.run_id, state, at=context.now(), rollouts=rollouts, detail=detail)


def _publish(context: Context, job: TrainingJob, environment: str) -> str:
    record_base(job.adapter, context.model, context.data_dir)
    capability = MERGED if job.capability in TRAININGS else job.capability
    published = publish(job.adapter, context.data_dir / "adapters", capability, origin=job.run_id)
    # The row must not outlive the folder of all versions, which may be new.
    flush(context.data_dir)
    version = AdapterVersion(
        name=published.name,
        capability=published.capability,
        version=published.version,
        path=str(published.path),
        files=published.files,
        cycle_id=context.cycle_id,
        training_run_id=job.run_id,
        environment_hash=environment,
        created_at=context.now(),
    )
    with context.write_session() as session:
        save_adapter(session, version)
    return published.name


def _figure(metrics: Metrics) -> str:
    return f"reward {metrics['reward']:.2f}"
