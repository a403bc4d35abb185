"""A training job: everything that determines an adapter, as one JSON file, and the source of its episodes.

Two runs of the same job with ``threads=1`` give the same adapter, bit for bit. Seeds of iteration i depend on (seed,
i) alone, so a longer job begins like a shorter one. Synthetic environments are read as text and run in the sandbox;
they are never imported here.
"""

import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from traced.core.seeds import derive_seed
from traced.inference.model_files import weights_digest
from traced.training.errors import JobError

if TYPE_CHECKING:
    from sandbox.episodes import EpisodeSource
    from sandbox.user import User

PAUSE, METRICS, SAMPLES = "pause", "metrics.jsonl", "samples.json"
# Fields that do not choose the weights, or only say how long to train: changing them keeps the checkpoints usable.
NOT_IN_FINGERPRINT = {
    "run_id",
    "out_dir",
    "checkpoint_every",
    "iterations",
    "solved_after",
    "threads",
    "limits",
    "owner",
    # These change the rounding at most, as ``threads`` does, so a run may continue on another device.
    "device",
    "attention",
    "processes",
    "shard",
    "report_to",
    "tags",
    "user",
    "engine_urls",
    "engine_key_file",
    "engine_silence_s",
    "engine_patience_s",
    "engine_sleeps",
}
# Fields that are not in the fingerprint while a setting is off, so that runs of versions without it can continue.
ABSENT_IF_OFF = {
    "overlap": ("overlap",),
    "teachers": ("teachers",),
    "start": ("start",),
    "hint_share": ("hint", "hint_share"),
    "demonstrations": ("demonstrations",),
    "open_share": ("open_share",),
    "kl": ("kl",),
    "entropy_bonus": ("entropy_bonus",),
    "recoveries": ("recoveries", "recovery_lr", "recovery_temperature"),
    "recovery_kl": ("recovery_kl",),
    "recovery_entropy_bonus": ("recovery_entropy_bonus",),
    "recovery_hint_share": ("recovery_hint_share",),
    "validate_every": ("validate_every", "validation_seeds", "validation_temperature"),
}
DEVICES = ("cpu", "cuda")
ATTENTION = ("auto", "eager", "sdpa", "flash_attention_2")
TRACKERS = ("tensorboard", "wandb", "mlflow")


AT_LEAST_ONE = (
    "iterations",
    "groups",
    "max_turns",
    "max_length",
    "max_tokens",
    "threads",
    "checkpoint_every",
    "processes",
    "micro_batch_tokens",
)


@dataclass(frozen=True)
class TrainingJob:
    """GRPO on one LoRA adapter; defaults are the paper's where it states one (method, section 3)."""

    run_id: str
    capability: str  # also names the adapter's target in reports; free text for --compare
    environment_source: dict[str, str]  # {"environment": FILE} or {"target": NAME, ...}
    model_path: str
    out_dir: str
    seed: int = 0
    iterations: int = 40  # optimizer steps, at most
    solved_after: int = 0  # iterations in a row without a failed rollout after which the run is finished; 0: never
    groups: int = 8  # G: seeds per iteration
    rollouts: int = 16  # K: rollouts per seed
    lr: float = 1e-5
    lora_r: int = 16
    lora_alpha: int = 16
    clip: float = 0.28
    max_turns: int = 16
    max_length: int = 2048  # tokens of one trajectory, prompt included
    max_tokens: int = 256  # tokens of one completion
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    hint: str = (
        ""  # at the end of the system prompt of a share of each group's rollouts, and stripped before the update
    )
    hint_share: float = 0.0
    demonstrations: int = 0  # rollouts of a group without a success that the environment's solution replaces
    kl: float = 0.0  # coefficient of the KL term to the base
    entropy_bonus: float = 0.0  # coefficient of the mean entropy per token in the objective
    # Tokens, padding included, of one forward and backward pass: at most on a CPU, of the first pass on a GPU, whose
    # memory decides about the others.
    micro_batch_tokens: int = 4096
    gradient_checkpointing: bool | None = None  # None: on a GPU
    device: str = "cpu"  # or "cuda": the cards of CUDA_VISIBLE_DEVICES, which a device lease sets
    attention: str = "auto"  # sdpa; flash_attention_2 needs its package
    processes: int = 1  # one per GPU; they share the update of every iteration
    shard: bool = False  # each process holds a part of the base, for a model that does not fit one GPU
    checkpoint_every: int = 1
    step_timeout_s: float = 30.0
    seed_low: int = 0  # training seeds are drawn from [seed_low, seed_high)
    seed_high: int = 100_000
    # Folders of adapters; the one with the number seed % n is the teacher of a seed. With teachers the job is
    # an on-policy distillation: the update follows their log-probs, and rewards only measure.
    teachers: list[str] = field(default_factory=list)
    start: str = ""  # folder of the adapter whose weights the training begins with; "": new ones
    open_share: float = 0.0  # share of the groups with seeds whose rewards have differed lately; 0: fresh seeds only
    validate_every: int = 0  # iterations between validations; 0: the last policy is published, whatever it is worth
    validation_seeds: int = 32  # taken from the end of the range, a fifth of it at most; training does not draw them
    # As in the evaluations that the adapter is made for; 0: greedy, unless fewer seeds are played several times.
    validation_temperature: float = 0.0
    recoveries: int = 0  # times that a collapsed run may go back to its best validated policy
    recovery_lr: float = 0.5  # factor of the learning rate for each of them
    recovery_temperature: float = 1.2  # factor of the sampling temperature
    # From the first recovery on these hold where they are above kl, entropy_bonus and hint_share.
    recovery_kl: float = 0.0
    recovery_entropy_bonus: float = 0.0
    recovery_hint_share: float = 0.0
    threads: int = 1
    limits: dict[str, float] = field(default_factory=dict)  # of the environment's container: ``SandboxLimits``
    # The model that is the user, if the environment asks for one: "model" (the table [target.user]), "data_dir",
    # and "cycle_id", where its replies are kept.
    user: dict[str, Any] = field(default_factory=dict)
    owner: str = "traced"  # of that container (``traced.core.ownership``)
    engine_urls: list[str] = field(default_factory=list)  # inference servers for the rollouts; none: in this process
    engine_key_file: str = ""  # file with the API key of these servers
    engine_silence_s: float = 300.0  # seconds without data after which a request to them fails
    engine_patience_s: float = 60.0  # seconds without any of them after which a request fails
    engine_sleeps: bool = False  # whether these servers sleep during each update (``traced.inference.engine_sleep``)
    overlap: int = 0  # iterations that the rollouts may be ahead of the update; 0: strictly on-policy
    report_to: list[str] = field(default_factory=list)  # experiment trackers
    tags: dict[str, str] = field(default_factory=dict)  # ids for them: cycle, capability, environment, run

    def __post_init__(self) -> None:
        keys = set(self.environment_source)
        if keys != {"environment"} and not {"target"} <= keys <= {"target", "split", "table", "data_dir"}:
            raise JobError(
                f"environment_source is {self.environment_source!r}; "
                'it must be {"environment": FILE} or {"target": NAME}, with "split", "table" and "data_dir" if need be'
            )
        if self.rollouts < 2:
            raise JobError(f"rollouts is {self.rollouts}; a group needs at least 2 rollouts")
        for name in AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise JobError(f"{name} is {getattr(self, name)}; it must be at least 1")
        _check_choice("device", [self.device], DEVICES)
        _check_choice("attention", [self.attention], ATTENTION)
        _check_choice("report_to", self.report_to, TRACKERS)
        if self.groups * self.rollouts % self.processes:
            raise JobError(
                f"{self.groups} groups of {self.rollouts} rollouts are no multiple of the {self.processes} processes",
                hint="choose training.groups x training.rollouts as a multiple of the number of GPUs",
            )
        if self.shard and not (self.processes > 1):
            raise JobError("shard needs several processes, and the job has 1", hint="training.processes")
        self._check_measures()
        if self.overlap not in (0, 1):
            raise JobError(f"overlap is {self.overlap}; it must be 0 or 1", hint="training.overlap")
        if self.overlap and not self.engine_urls:
            raise JobError(
                "overlap is 1, and the engine runs in the trainer's process, which updates and samples in turn",
                hint="training.overlap = 0, or an engine of its own (engine_urls)",
            )
        if self.overlap and self.engine_sleeps:
            raise JobError("engine_sleeps is set and overlap is 1, which samples during the update")
        if self.training_seeds < self.groups:
            raise JobError(
                f"[{self.seed_low}, {self.seed_high}) holds fewer seeds to train on than the {self.groups} groups"
            )

    def _check_measures(self) -> None:
        """Check the settings against a collapse."""
        for name in ("open_share", "hint_share", "recovery_hint_share"):
            if not 0 <= getattr(self, name) < 1:
                raise JobError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("hint_share", "recovery_hint_share"):
            if getattr(self, name) and not self.hint:
                raise JobError(
                    f"{name} is {getattr(self, name)}, and the job has no hint: it is the description of a capability, "
                    "which a training on a target does not have",
                    hint=f"training.{name} = 0",
                )
        for name in ("kl", "entropy_bonus", "recovery_kl", "recovery_entropy_bonus"):
            if getattr(self, name) < 0:
                raise JobError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not 0 <= self.demonstrations < self.rollouts:
            raise JobError(
                f"demonstrations is {self.demonstrations}; one of {self.rollouts} rollouts must be the policy's",
                hint=f"training.demonstrations = {self.rollouts - 1} at most",
            )
        if self.demonstrations and "environment" not in self.environment_source:
            raise JobError(
                f"demonstrations is {self.demonstrations}, and a target shows no solutions to a training",
                hint="training.demonstrations = 0",
            )
        excluded = ("kl", "recovery_kl", "hint_share", "recovery_hint_share", "demonstrations", "shard")
        if self.teachers and (name := next(filter(lambda name: getattr(self, name), excluded), "")):
            raise JobError(
                f"{name} is set, and the job has teachers, which a distillation does not combine with it",
                hint=f"training.{name} = {'false' if name == 'shard' else 0}",
            )
        if self.recoveries and not self.validate_every:
            raise JobError(
                f"recoveries is {self.recoveries}, and no policy is validated that a collapsed run could go back to",
                hint="training.validate_every = 5, or training.recoveries = 0",
            )

    @property
    def dtype(self) -> str:
        """Return the type of the base's weights; the adapter and the optimizer are in float32 on every device."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def recomputes_activations(self) -> bool:
        """Return whether activations are computed again in the backward pass (gradient checkpointing)."""
        return self.device == "cuda" if self.gradient_checkpointing is None else self.gradient_checkpointing

    @property
    def out(self) -> Path:
        """Return the job's folder, which holds the job file, metrics, samples, checkpoints and the adapter."""
        return Path(self.out_dir)

    @property
    def adapter(self) -> Path:
        """Return the folder of the finished adapter (PEFT layout)."""
        return self.out / "adapter"

    @property
    def pause(self) -> Path:
        """Return the file that requests a pause: the run saves a checkpoint and ends unfinished."""
        return self.out / PAUSE

    @property
    def metrics(self) -> Path:
        """Return the metrics file, one JSON object per iteration."""
        return self.out / METRICS

    @property
    def samples(self) -> Path:
        """Return the file with some rollouts of the newest iteration."""
        return self.out / SAMPLES

    @property
    def validation(self) -> list[int]:
        """Return the seeds that choose between the policies of the run."""
        size = self.seed_high - self.seed_low
        count = max(1, min(self.validation_seeds, size // 5)) if self.validate_every else 0
        return list(range(self.seed_high - count, self.seed_high))

    @property
    def validation_trials(self) -> int:
        """Return how often a validation plays each seed: once, or so often that it has about ``validation_seeds``."""
        return max(1, round(self.validation_seeds / max(1, len(self.validation))))

    @property
    def trial_temperature(self) -> float:
        """Return the sampling temperature of a validation; greedy trials of a seed would all be the same."""
        return self.validation_temperature or (self.temperature if self.validation_trials > 1 else 0.0)

    @property
    def training_seeds(self) -> int:
        """Return the number of seeds that groups are drawn from."""
        return self.seed_high - self.seed_low - len(self.validation)

    @property
    def hinted_rollouts(self) -> int:
        """Return how many rollouts of each group have the hint; the others show what the policy does by itself."""
        return _some_of(self.rollouts, self.hint_share)

    @property
    def open_groups(self) -> int:
        """Return how many groups of an iteration have open seeds, if there are so many (``OpenSeeds``)."""
        return _some_of(self.groups, self.open_share)

    def group_seeds(self, iteration: int) -> list[int]:
        """Return the distinct environment seeds of one iteration's groups."""
        return list(islice(self.seed_draws(iteration), self.groups))

    def seed_draws(self, iteration: int) -> Iterator[int]:
        """Yield all training seeds in the order of the iteration's draw, each one once."""
        seeds: set[int] = set()
        draw = 0
        # Drawn one by one until distinct: a repeated seed would merge two groups into one.
        while len(seeds) < self.training_seeds:
            seed = self.seed_low + derive_seed(self.seed, iteration, draw) % self.training_seeds
            draw += 1
            if seed not in seeds:
                seeds.add(seed)
                yield seed

    def fingerprint(self) -> str:
        """Return the SHA-256 of what determines the adapter: fields, environment source and the base's files."""
        values = {key: value for key, value in asdict(self).items() if key not in NOT_IN_FINGERPRINT}
        # As in the fingerprints of earlier versions, so that their unfinished runs can continue.
        values["gradient_checkpointing"] = False
        values["micro_batch_tokens"] = 4096
        for setting, names in ABSENT_IF_OFF.items():
            if not values[setting]:
                for name in names:
                    del values[name]
        if self.teachers:
            values["teachers"] = [weights_digest(Path(folder)) for folder in self.teachers]
        if self.start:
            values["start"] = weights_digest(Path(self.start))
        if self.user:
            values["user"] = {
                key: self.user["model"][key] for key in ("model", "base_url", "temperature", "max_tokens")
            }
        values["model_path"] = weights_digest(Path(self.model_path))
        environment = self.environment_source.get("environment")
        if environment is not None:
            values["environment_source"] = hashlib.sha256(_read(Path(environment))).hexdigest()
        else:
            # Where the data directory lies, and limits of time, do not change what is learned.
            source = {key: value for key, value in self.environment_source.items() if key in ("target", "split")}
            values["environment_source"] = source
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        """Return the job as it is stored on disk."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"


def _some_of(count: int, share: float) -> int:
    """Return a share of a number, rounded: at least 1 if the share is above 0, but never all of them."""
    return min(max(1, round(share * count)), count - 1) if share > 0 else 0


def _check_choice(name: str, values: Sequence[str], choices: Sequence[str]) -> None:
    for value in values:
        if value not in choices:
            raise JobError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class TrainingResult:
    """A finished job: adapter folder, iterations, the iteration it resumed from, and seconds of this call.

    ``solved``: it ended early because every rollout had succeeded for ``solved_after`` iterations. ``stalled``: why it
    learned nothing more and ended early; "" if it did not. ``policy``: the updates of the published policy; the last
    one unless validation has chosen another. ``recoveries``: when and how the run went back to an earlier policy.
    ``validation_episodes``: played beside the rollouts, in the whole run.
    """

    adapter: str
    iterations: int
    resumed_from: int
    seconds: float
    solved: bool = False
    stalled: str = ""
    policy: int | None = None
    recoveries: list[str] = field(default_factory=list)
    validation_episodes: int = 0


@dataclass(frozen=True)
class Validation:
    """Figures of one policy: mean success and reward in [0, 1] over ``episodes``, after ``policy`` updates.

    ``attempts`` counts lost episodes as well; 0 in files of earlier versions, which did not count them.
    """

    success: float
    reward: float
    policy: int
    episodes: int
    attempts: int = 0

    @property
    def rank(self) -> tuple[float, float, int]:
        """Return what policies are compared by: success, reward, and updates; the best policy has the highest.

        A lost episode counts as failed here, so that it never makes a policy the better one.
        """
        attempts = max(self.attempts, self.episodes)
        return round(self.success * self.episodes) / attempts, self.reward * self.episodes / attempts, self.policy

    def metrics(self) -> dict[str, float]:
        """Return the figures as metrics of the iteration whose rollouts the policy sampled."""
        return {"validation_success": self.success, "validation_reward": self.reward, "validation_policy": self.policy}


OpenSource = Callable[[TrainingJob], AbstractAsyncContextManager["EpisodeSource"]]
OpenWithUser = Callable[["User | None"], AbstractAsyncContextManager["EpisodeSource"]]


class Trainer(Protocol):
    """Trains the adapter of a job and continues where an earlier call stopped; ``traced.training.grpo.train`` is TRL's.

    ``traced.training.process`` runs it in a process of its own, on the device of the job.
    """

    def __call__(
        self, job: TrainingJob, on_metric: Callable[[dict[str, float]], None], open_source: OpenSource
    ) -> TrainingResult:
        """Train the adapter in ``job.adapter``.

        Args:
            on_metric: Is called with the metrics of every iteration of this call.
            open_source: Returns the source of the job's episodes.

        Raises:
            TrainingError: The training cannot begin or continue.
        """
        ...


def folder_of_run(data_dir: Path, cycle_id: str, capability: str, environment: str) -> Path:
    """Return the folder of a cycle's run for a capability in the environment of this hash."""
    return data_dir / "runs" / cycle_id / "training" / f"{capability}-{environment[:12]}"


def read_job(path: Path) -> TrainingJob:
    """Read a job file; raises ``JobError`` with the wrong key or value."""
    try:
        values: dict[str, Any] = json.loads(_read(path))
    except ValueError as error:
        raise JobError(f"{path} is not JSON: {error}") from error
    return job_from(values, str(path))


def job_from(values: dict[str, Any], origin: str) -> TrainingJob:
    """Return the job with these fields; raises ``JobError`` with the wrong key or value of ``origin``."""
    names = {f.name for f in fields(TrainingJob)}
    missing = dataclasses.MISSING
    required = {f.name for f in fields(TrainingJob) if f.default is missing and f.default_factory is missing}
    if unknown := sorted(set(values) - names):
        raise JobError(f"{origin}: unknown key {unknown[0]!r}")
    if absent := sorted(required - set(values)):
        raise JobError(f"{origin}: {absent[0]!r} is missing")
    return TrainingJob(**values)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}") from error


def open_source(job: TrainingJob) -> AbstractAsyncContextManager[Any]:
    """Return an asynchronous context manager that yields the job's ``EpisodeSource``.

    Raises:
        JobError: Unknown split, or seeds outside of it.
    """
    open_with = _environment(job) if "environment" in job.environment_source else _target(job)
    return _with_user(job, open_with) if job.user else open_with(None)


def _environment(job: TrainingJob) -> OpenWithUser:
    from sandbox.client import SandboxSource
    from sandbox.policy import SandboxLimits

    source_code = Path(job.environment_source["environment"]).read_text(encoding="utf-8")
    limits = SandboxLimits(**cast(dict[str, Any], job.limits))
    return lambda user: SandboxSource(source_code, limits=limits, owner=job.owner, user=user)


def _target(job: TrainingJob) -> OpenWithUser:
    from sandbox.policy import SandboxLimits
    from traced.config.settings import TargetSection
    from traced.targets.registry import find_target

    table = json.loads(job.environment_source.get("table", "{}"))
    section = TargetSection(**{"name": job.environment_source["target"], **table})
    data_dir = Path(job.environment_source.get("data_dir", job.out_dir))
    chosen_target = find_target(section, data_dir, SandboxLimits(**cast(dict[str, Any], job.limits)), lambda: job.owner)
    split = job.environment_source.get("split", "train")
    if split not in chosen_target.splits:
        raise JobError(
            f"target {chosen_target.name!r} has no split {split!r}; it has {', '.join(chosen_target.splits)}"
        )
    seeds = chosen_target.splits[split]
    if not (seeds.start <= job.seed_low and job.seed_high <= seeds.stop):
        raise JobError(
            f"seeds [{job.seed_low}, {job.seed_high}) are outside the split {split!r} of {chosen_target.name} ({seeds})"
        )
    return chosen_target.source


@asynccontextmanager
async def _with_user(job: TrainingJob, open_with: OpenWithUser) -> AsyncIterator["EpisodeSource"]:
    """Open the source with the model that is the user; raises ``UserUnavailable``."""
    from store.database import open_store
    from traced.config.cycle_sections import UserSection
    from traced.core.location import store_url
    from traced.llm.connection import StoreLedger
    from traced.rollouts.model_user import model_user

    data_dir = Path(job.user["data_dir"])
    store = open_store(store_url(data_dir))
    try:
        ledger = StoreLedger(store, lambda: datetime.now(UTC))
        section = UserSection(**job.user["model"])
        async with (
            model_user(section, data_dir, ledger, job.user["cycle_id"]) as user,
            open_with(user) as source,
        ):
            yield source
    finally:
        store.dispose()
