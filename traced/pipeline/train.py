"""Train: one LoRA adapter with GRPO in the capability's environment, in a child process, published as a version.

Invariants: a run is named by cycle, capability and environment, its folder holds its checkpoints, and calling again
carries on from them; an adapter version is in the store once its files are on disk. How it fails: an environment that
breaks under training, or a person who has stopped it, ends its capability (``CapabilityError``); Docker, the disk or
the process failing stops the cycle, and the same command carries on from the last checkpoint.

A training that a person has stopped: decided once, and kept whatever becomes of the process that trains.

Invariants: the decision is an event of the stage "train" with who decided and why, in the store before anything is
stopped. From then on nobody begins or goes on with a training of that capability in that cycle, after a pause or a
restart neither, and what it has come to meanwhile is not used: the capability ends with the reason that was given.
What was decided first stands.
How it fails: ``CapabilityError`` is how the capability ends. Not covered: who may decide (``traced.api.control``),
and bringing the process at work to its safe point (``traced.pipeline.child_runner``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlmodel import Session

from sandbox import docker_engine
from store.records import AdapterVersion, IterationMetrics, RunState, StageEvent, StageState, TrainingRun
from store.repositories.adapters import (
    get_adapter,
    list_adapters,
    save_adapter,
    save_iterations,
    save_training_run,
    set_training_state,
)
from store.repositories.cycles import list_stage_events, save_stage_event
from store.repositories.environments import get_environment
from traced.config.settings import Settings
from traced.core.errors import CapabilityError, DiskError
from traced.core.files import publish_file
from traced.core.ownership import sandbox_owner
from traced.core.seeds import derive_seed
from traced.pipeline.context import Context
from traced.registry.publication import publish
from traced.training.errors import EnvironmentFailed, TrainingError
from traced.training.job import TrainingJob, folder_of_run
from traced.training.metrics import Metrics, read_metrics
from traced.training.process import train as run_job

TRAIN = "train"  # the stage
BY = "stopped_by"  # in its event: who


@dataclass(frozen=True)
class Stopped:
    """Who has stopped the training of a capability, when and why."""

    who: str
    at: datetime
    reason: str

    @property
    def why(self) -> str:
        """The reason that the capability ends with."""
        return f"{self.who} has stopped its training" + (f": {self.reason}" if self.reason else "")


def stop(session: Session, run: TrainingRun, *, who: str, at: datetime, reason: str = "") -> Stopped:
    """Decide that nothing comes of this run, nor of its capability in its cycle."""
    before = stopped(session, run.cycle_id, run.capability)
    if before is not None:
        return before
    detail = {"run": run.id, BY: who, "reason": reason}
    save_stage_event(session, StageEvent(run.cycle_id, TRAIN, StageState.STARTED, at, run.capability, detail))
    return Stopped(who, at, reason)


def stopped(session: Session, cycle_id: str, capability: str) -> Stopped | None:
    """What was decided about the training of a capability in a cycle, if anything was."""
    for event in list_stage_events(session, cycle_id):
        if (event.stage, event.capability) == (TRAIN, capability) and BY in event.detail:
            return Stopped(event.detail[BY], event.at, event.detail["reason"])
    return None


def make_sure_it_is_wanted(session: Session, cycle_id: str, capability: str) -> None:
    """Raise ``CapabilityError`` where a person has stopped it."""
    found = stopped(session, cycle_id, capability)
    if found is not None:
        raise CapabilityError(found.why)


TRAINING_SEEDS = (0, 100_000)  # of a synthetic environment; the gate takes others


async def train(context: Context, capability: str, environment: str) -> str:
    """The adapter version trained in the environment of this hash; starts, resumes or finds its run."""
    run_id = f"{context.cycle_id}/{capability}/{environment[:12]}"
    total = context.settings.training.iterations
    with context.reading() as session:
        make_sure_it_is_wanted(session, context.cycle_id, capability)
    with context.stage("train", f"Train an adapter for {capability}", capability, total) as shown:
        name = trained(context, run_id)
        if name is None:
            job = _job(context, run_id, capability, environment)
            _begin(context, job, environment)
            await _supervised(context, job, lambda metrics: shown.reach(int(metrics["iteration"]), _figure(metrics)))
            name = _publish(context, job, environment)
        shown.found = {"adapter": name, "run": run_id}
    return name


def trained(context: Context, run_id: str) -> str | None:
    """The adapter version that a run has given, None while it has not."""
    with context.reading() as session:
        made = list_adapters(session, cycle_id=context.cycle_id)
    return next((adapter.name for adapter in made if adapter.training_run_id == run_id), None)


def training_folder(context: Context, capability: str, environment: str) -> Path:
    """Where the run of this environment keeps its checkpoints."""
    return folder_of_run(context.data_dir, context.cycle_id, capability, environment)


def adapter_path(context: Context, adapter: str) -> Path:
    """Where the files of a version lie."""
    with context.reading() as session:
        return Path(get_adapter(session, adapter).path)


def job_for(
    settings: Settings, *, run_id: str, capability: str, source: dict[str, str], model: Path, out: Path
) -> TrainingJob:
    """A training job by the settings; ``capability`` also gives it a seed of its own."""
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
        max_turns=training.max_turns,
        max_length=training.max_length,
        max_tokens=settings.engine.max_tokens,
        temperature=training.temperature,
        seed_low=TRAINING_SEEDS[0],
        seed_high=TRAINING_SEEDS[1],
        threads=max(1, settings.threads // training.at_once),
        limits=settings.sandbox.model_dump(),
        owner=sandbox_owner(settings.data_dir),
    )


def _job(context: Context, run_id: str, capability: str, environment: str) -> TrainingJob:
    file = context.data_dir / "environments" / f"{environment}.py"
    if not file.exists():
        with context.reading() as session:
            source_code = get_environment(session, environment).source_code
        file.parent.mkdir(parents=True, exist_ok=True)
        publish_file(file, source_code)
    return job_for(
        context.settings,
        run_id=run_id,
        capability=capability,
        source={"environment": str(file)},
        model=context.model.path,
        out=training_folder(context, capability, environment),
    )


def _begin(context: Context, job: TrainingJob, environment: str) -> None:
    """Store the run, or note that it goes on."""
    config = context.settings.training.model_dump() | {"seeds": list(TRAINING_SEEDS), "threads": job.threads}
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
    with context.writing() as session:
        save_training_run(session, run)
        set_training_state(session, job.run_id, RunState.RUNNING, at=started)


async def _supervised(context: Context, job: TrainingJob, on_metric: Callable[[Metrics], None]) -> None:
    """Run the job's process and record how it ended, whatever the end."""
    try:
        await run_job(job, on_metric)
    except EnvironmentFailed as error:
        _end(context, job, RunState.FAILED, str(error))
        docker_engine.connect().close()  # Docker gone is no failure of the environment: EngineDown says so
        raise CapabilityError(str(error)) from error
    except (DiskError, TrainingError) as error:
        _end(context, job, RunState.INTERRUPTED, str(error))
        raise
    except BaseException as stop:
        _end(context, job, RunState.INTERRUPTED, type(stop).__name__)
        raise
    _end(context, job, RunState.FINISHED)


def _end(context: Context, job: TrainingJob, state: RunState, detail: str = "") -> None:
    metrics = read_metrics(job.metrics)
    figures = [IterationMetrics(job.run_id, int(values["iteration"]), dict(values)) for values in metrics]
    rollouts = len(metrics) * job.groups * job.rollouts
    with context.writing() as session:
        save_iterations(session, figures)
        set_training_state(session, job.run_id, state, at=context.now(), rollouts=rollouts, detail=detail)


def _publish(context: Context, job: TrainingJob, environment: str) -> str:
    published = publish(job.adapter, context.data_dir / "adapters", job.capability, origin=job.run_id)
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
    with context.writing() as session:
        save_adapter(session, version)
    return published.name


def _figure(metrics: Metrics) -> str:
    return f"reward {metrics['reward']:.2f}"
