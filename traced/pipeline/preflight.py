"""Checks before a cycle: whether model, settings, engine and device fit together; one finding each.

``quick_checks`` read files and ask the driver. ``model_checks`` load the tokenizer, build the model without weights
and, with ``engine.urls``, load a probe adapter at each server. A cycle makes both (``check_cycle``), ``traced doctor``
shows all findings. The bundled model with its own limits or wider ones is tested with the package, so a cycle of it
skips the second part.

Not covered: the memory limit of a container, and whether training environments that are synthesised later fit the
limits; admission plays them.
"""

import asyncio
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from sandbox.contract import Message, Task
from traced.config.profiles import BUNDLED
from traced.config.settings import Settings
from traced.core.checks import Finding, raise_first
from traced.core.errors import ConfigError, TracedError
from traced.inference import start
from traced.inference.chat_format import ChatFormat, TurnFormat, load_chat_format
from traced.inference.client import EngineClient
from traced.inference.engine_process import VllmOptions, detect_build
from traced.inference.errors import EngineStartError, TemplateError
from traced.inference.model_files import ModelFiles, base_model
from traced.inference.server_check import check_server
from traced.jobs.devices import DeviceReading, NvmlProbe, Readings
from traced.jobs.idleness import suitable_devices
from traced.targets.registry import target

if TYPE_CHECKING:
    from traced.training.footprint import Footprint, MemoryNeed, MetaModel

GIB = 2**30
# Seeds whose oracle's episodes are counted.
SEEDS = 8
# Messages after which an oracle that does not end is stopped.
MAX_TURNS = 200
# Below this share of the base's parameters, an adapter most likely misses a large part of the model.
MIN_SHARE = 0.005
# The metric of an iteration with the most bytes that a process of the training has taken so far.
PEAK = "peak_memory"
# Above this share of the memory, an estimate is a warning: it may not fit.
TIGHT = 0.95
LOOPBACK = ("127.0.0.1", "::1", "localhost")
UTILIZATION = "--gpu-memory-utilization"
# Settings of the bundled model that are tested with the package; larger values fit as well.
TESTED_LIMITS = (
    "training.max_turns",
    "training.max_length",
    "engine.max_length",
    "engine.max_tokens",
    "collect.max_turns",
)
# Settings whose larger values take more memory.
MEMORY_SETTINGS = (
    "training.lora_r",
    "training.at_once",
    "training.processes",
    "training.micro_batch_tokens",
)
ReadGpus = Callable[[], Readings]


def read_gpus() -> Readings:
    """Read the GPUs of this machine."""
    return NvmlProbe().read()


def check_cycle(settings: Settings, gpus: ReadGpus = read_gpus) -> None:
    """Raise ``ConfigError`` with the setting to change if a cycle of these settings would fail."""
    raise_first(quick_checks(settings, gpus))
    if needs_model_checks(settings):
        raise_first(model_checks(settings, gpus))


def needs_model_checks(settings: Settings) -> bool:
    """Return whether model, limits or use of memory are others than those that are tested with the package."""
    is_limited = any(_value(settings, key) < _default(key) for key in TESTED_LIMITS)
    needs_memory = any(_value(settings, key) > _default(key) for key in MEMORY_SETTINGS)
    is_on_cpu = settings.devices.train_on == Settings.model_fields["devices"].default.train_on
    return settings.model.spec != BUNDLED or bool(settings.engine.urls) or is_limited or needs_memory or not is_on_cpu


def quick_checks(settings: Settings, gpus: ReadGpus = read_gpus) -> Iterator[Finding]:
    """Yield the findings that need neither the model nor a server."""
    yield _engine(settings)
    yield _router(settings)
    yield _training(settings)
    yield _training_device(settings, gpus)
    yield _trackers(settings)


def model_checks(settings: Settings, gpus: ReadGpus = read_gpus) -> Iterator[Finding]:
    """Yield the findings on the base model, on its limits, and on the servers at ``engine.urls``.

    Raises:
        ModelError: The model is missing or has no chat template.
    """
    subject = Subject(settings, base_model(settings))
    yield _template(subject)
    yield _episode(subject)
    yield _reach(subject)
    if settings.training.shard:
        yield _split(subject)
    yield from _servers(subject)
    yield from _memory(subject, gpus)


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield the findings of all checks; a check that cannot be made is a failed one."""
    try:
        yield from quick_checks(settings)
        if start.backend(settings) != "openai":
            yield from model_checks(settings)
    except TracedError as error:
        yield Finding("preflight", False, f"not all checks could be made: {error.message}", error.hint or "model.spec")


@dataclass(frozen=True)
class Subject:
    """What the checks of a model share: its files, chat format, and sizes."""

    settings: Settings
    files: ModelFiles

    @cached_property
    def chat_format(self) -> ChatFormat:
        """Return the model's chat format."""
        return load_chat_format(self.files.path)

    @cached_property
    def meta(self) -> "MetaModel":
        """Return the model with an adapter of the settings, without its weights."""
        # Imported here because torch and PEFT take seconds to import.
        from traced.training.footprint import MetaModel
        from traced.training.job import TrainingJob

        training, source = self.settings.training, {"target": self.settings.target.name}
        path, alpha = str(self.files.path), training.lora_alpha
        return MetaModel(TrainingJob("check", "check", source, path, "", lora_r=training.lora_r, lora_alpha=alpha))

    @property
    def footprint(self) -> "Footprint":
        """Return the sizes of model and adapter."""
        return self.meta.footprint


def _engine(settings: Settings) -> Finding:
    name, engine = start.backend(settings), settings.engine
    if name == "openai":
        observed = 'engine.backend = "openai" serves no adapters: it can collect and evaluate --base, and run no cycle'
        return Finding("engine", False, observed, 'engine.backend = "vllm"')
    if engine.urls:
        return Finding("engine", True, f"{name} at {', '.join(engine.urls)}")
    if name == "embedded":
        is_slow = settings.model.spec != BUNDLED
        note = "vLLM is faster, and needed for large models: make vllm, or make vllm-cpu" if is_slow else ""
        return Finding("engine", True, "embedded, in float32 on the CPU", warning=note)
    try:
        python = str(start.find_vllm_python(settings) or sys.executable)
        build = detect_build(python)
        flags = _flags(settings, build.gpu)
    except EngineStartError as error:
        return Finding("engine", False, error.message, error.hint)
    rank, lora_r = int(_number(flags, "--max-lora-rank", 0)), settings.training.lora_r
    if rank < lora_r:
        return Finding(
            "engine",
            False,
            f"engine.vllm_args sets --max-lora-rank to {rank}, below training.lora_r = {lora_r}",
            "remove this flag from engine.vllm_args, or lower training.lora_r",
        )
    slots, adapters = int(_number(flags, "--max-loras", 0)), start.max_adapters(settings)
    if slots < adapters or "--no-enable-lora" in flags:
        # With more adapters than slots, vLLM reassigns the slot of a running request (vLLM issue 47724).
        return Finding(
            "engine",
            False,
            f"engine.vllm_args leaves {0 if '--no-enable-lora' in flags else slots} slots for adapters; "
            f"serving.max_adapters and the trainings need {adapters}",
            "remove --max-loras and --no-enable-lora from engine.vllm_args, or lower serving.max_adapters",
        )
    kind = "a GPU" if build.gpu else "a CPU"
    return Finding("engine", True, f"vLLM {build.version} for {kind}, adapters up to rank {rank}")


def _flags(settings: Settings, gpu: bool) -> list[str]:
    engine = settings.engine
    options = VllmOptions(
        Path(), start.max_adapters(settings), settings.training.lora_r, engine.max_length, extra_flags=engine.vllm_args
    )
    return options.flags(0, gpu=gpu)


def flag(flags: Sequence[str], name: str) -> str:
    """Return the last value of a command line's flag, written as "--flag value" or "--flag=value"; "" without it."""
    values = [value for text, value in pairwise(flags) if text == name]
    joined = [text.partition("=")[2] for text in flags if text.startswith(f"{name}=")]
    # traced writes its own flags as two words, and the user's come after them.
    return [*values, *joined][-1] if values or joined else ""


def _number(flags: Sequence[str], name: str, default: float) -> float:
    try:
        return float(flag(flags, name) or default)
    except ValueError:
        # vLLM reports a value that is no number itself.
        return default


def _router(settings: Settings) -> Finding:
    router = settings.routing.router
    if router == "hidden-state" and start.backend(settings) == "vllm":
        # Imports the store's libraries, which doctor does without otherwise.
        from traced.pipeline.context import check_embeddable

        try:
            check_embeddable(base_model(settings))
        except TracedError as error:
            return Finding("router", False, error.message, error.hint)
        # Cycles embed with an engine of their own; the router has only vLLM, which returns no hidden states.
        warning = 'traced serve sends all conversations with model "auto" to the base; routing.router = "labels" routes'
        return Finding("router", True, router, warning=warning)
    return Finding("router", True, router)


def _training(settings: Settings) -> Finding:
    training, name = settings.training, "training"
    rollouts = training.groups * training.rollouts
    if rollouts % training.processes:
        observed = f"{rollouts} rollouts (training.groups x training.rollouts) are no multiple of training.processes"
        return Finding(name, False, f"{observed} = {training.processes}", "training.processes, or training.groups")
    if training.shard and training.processes == 1:
        return Finding(
            name, False, "training.shard needs several processes", "training.processes = 2, or shard = false"
        )
    if training.shard and start.backend(settings) == "embedded":
        observed = "training.shard = true splits the base, and the embedded engine needs all of it in the trainer"
        return Finding(name, False, observed, 'training.shard = false, or engine.backend = "vllm"')
    if training.overlap and start.backend(settings) == "embedded":
        observed = "training.overlap = 1 needs an engine of its own, and the embedded engine samples in the trainer"
        return Finding(name, False, observed, 'training.overlap = 0, or engine.backend = "vllm"')
    return Finding(name, True, f"up to {training.iterations} iterations of {rollouts} rollouts")


def _training_device(settings: Settings, gpus: ReadGpus) -> Finding:
    train_on, name = settings.devices.train_on, "training device"
    if train_on == "cpu":
        return Finding(name, True, "CPU")
    readings = gpus()
    processes = settings.training.processes
    devices = suitable_devices(readings.devices, train_on, processes)
    names = ", ".join(device.name for device in devices)
    if 0 < len(devices) < processes:
        observed = f"training.processes = {processes} needs {processes} GPUs, and devices.train_on = "
        # A number of processes into which the rollouts can be divided.
        rollouts = settings.training.groups * settings.training.rollouts
        fix = f"training.processes = {max(n for n in range(1, len(devices) + 1) if rollouts % n == 0)}"
        fix += "" if train_on in ("auto", "cuda") else ', or devices.train_on = "cuda"'
        return Finding(name, False, f'{observed}"{train_on}" finds {len(devices)} ({names})', fix)
    if devices:
        return Finding(name, True, names, warning=_foreign_server(settings, readings))
    if train_on == "auto":
        slow = "" if settings.model.spec in (BUNDLED, "smollm2") else "a training of this model on a CPU takes days"
        return Finding(name, True, "CPU, because no GPU can be used", warning=slow)
    visible = ", ".join(device.id for device in readings.devices) or "; ".join(readings.problems) or "no GPU"
    return Finding(
        name,
        False,
        f'devices.train_on = "{train_on}", and this machine has no such GPU ({visible})',
        'devices.train_on = "auto" takes a GPU if there is one, "cpu" none',
    )


def _foreign_server(settings: Settings, readings: Readings) -> str:
    """Return a warning if a server at ``engine.urls`` keeps the service from ever leasing its GPU, else ""."""
    gpus = [device for device in readings.devices if device.kind == "cuda"]
    is_local = any(urlsplit(url).hostname in LOOPBACK for url in settings.engine.urls)
    if not gpus or not is_local or not start.trains_on_engine_gpu(settings, [gpu.id for gpu in gpus]):
        return ""
    limits, share = settings.devices, gpus[0].memory_used / gpus[0].memory_total
    if limits.gpu_foreign > 0 and share <= limits.gpu_memory:
        return ""
    return (
        "the server at engine.urls counts as a foreign process, so the service leases its GPU to no training: "
        f"devices.gpu_foreign = 1 (now {limits.gpu_foreign}) and devices.gpu_memory (now {limits.gpu_memory:g}) "
        f"above the share of the memory in use ({share:.2f})"
    )


def _trackers(settings: Settings) -> Finding:
    trackers = settings.training.report_to
    missing = [name for name in trackers if importlib.util.find_spec(name) is None]
    if missing:
        observed = f'training.report_to names "{missing[0]}", and its package is not installed'
        return Finding("trackers", False, observed, f"pip install {missing[0]}, or training.report_to = []")
    return Finding("trackers", True, ", ".join(trackers) or "none")


def _template(subject: Subject) -> Finding:
    try:
        TurnFormat(subject.chat_format)
    except TemplateError as error:
        return Finding("chat template", False, error.message, "model.spec: another model")
    family = getattr(subject.chat_format, "family", "")
    return Finding("chat template", True, f"token-exact{f', {family}' if family else ''}")


@dataclass(frozen=True)
class EpisodeSize:
    """The largest numbers of the counted episodes."""

    tokens: int
    turns: int


def oracle_size(subject: Subject) -> EpisodeSize | None:
    """Return the size of the target's largest episode among the first seeds, played by its oracle; None without one.

    Raises:
        ConfigError: The target's environment or its oracle fails.
    """
    name = subject.settings.target.name
    episode_target = target(name)
    sizes = []
    for seed in episode_target.splits["train"][:SEEDS]:
        environment = episode_target.environment()
        if not hasattr(environment, "oracle"):
            return None
        try:
            task, messages = _oracle_episode(environment, seed)
        except NotImplementedError:
            return None
        # The environment is the user's code.
        except Exception as error:
            raise ConfigError(
                f"the oracle of the target {name} fails at seed {seed}: {type(error).__name__}: {error}",
                hint="correct oracle() or step() of the target's environment",
            ) from error
        sizes.append(
            EpisodeSize(
                len(subject.chat_format.render(messages, task.tools)),
                sum(message["role"] == "assistant" for message in messages),
            )
        )
    return EpisodeSize(max(size.tokens for size in sizes), max(size.turns for size in sizes))


def _oracle_episode(environment: object, seed: int) -> tuple[Task, list[Message]]:
    world: Any = environment
    task: Task = world.reset(seed)
    messages = [{"role": "system", "content": task.system}, *task.messages]
    for turn, message in enumerate(world.oracle()):
        messages += [message, *world.step(message)]
        if world.done or turn + 1 == MAX_TURNS:
            break
    return task, messages


def _episode(subject: Subject) -> Finding:
    settings, name = subject.settings, "episode"
    size = oracle_size(subject)
    if size is None:
        return Finding(name, True, f"the target {settings.target.name} has no oracle, so nothing was counted")
    observed = f"the oracle's longest of {SEEDS} has {size.tokens} tokens and {size.turns} assistant messages"
    positions = subject.footprint.positions
    if size.tokens > positions:
        return Finding(name, False, f"{observed}, but the model has {positions} positions", "model.spec: another model")
    needs = {
        "training.max_length": size.tokens,
        "engine.max_length": size.tokens,
        "training.max_turns": size.turns,
        "collect.max_turns": size.turns,
    }
    for key, need in needs.items():
        if _value(settings, key) < need:
            # Twice the oracle's, which wastes no step.
            return Finding(name, False, f"{observed}, but {key} is {_value(settings, key)}", f"{key} = {2 * need}")
    return Finding(name, True, observed)


def _reach(subject: Subject) -> Finding:
    sizes = subject.footprint
    observed = (
        f"changes {sizes.adapted / sizes.parameters:.0%} of {sizes.parameters / 1e6:,.0f}M parameters with "
        f"{sizes.adapter_parameters / 1e6:,.1f}M of its own ({sizes.adapter_share:.1%})"
    )
    warning = ""
    if sizes.missed_experts:
        warning = f"the adapter does not reach the experts: {', '.join(sizes.missed_experts[:3])}"
    elif sizes.adapter_share < MIN_SHARE:
        warning = f"under {MIN_SHARE:.1%}: raise training.lora_r, or see whether the model has experts of its own kind"
    return Finding("adapter", True, observed, warning=warning)


def _split(subject: Subject) -> Finding:
    if subject.meta.can_be_split:
        return Finding("shards", True, f"layer by layer over {subject.settings.training.processes} processes")
    observed = "training.shard = true, and transformers cannot split the layers of this model"
    return Finding("shards", False, observed, "training.shard = false, or another model (model.spec)")


def _servers(subject: Subject) -> list[Finding]:
    settings = subject.settings
    if not settings.engine.urls:
        return []
    key = Path(settings.engine.key_file).read_text().strip() if settings.engine.key_file else ""

    async def check(url: str, probe: Path) -> list[Finding]:
        async with EngineClient(start.server_root(url), key=key, base=settings.engine.model) as client:
            limit = min(settings.engine.max_length, subject.footprint.positions)
            rank = settings.training.lora_r
            return await check_server(client, subject.chat_format, probe, rank=rank, positions=limit)

    async def check_all(probe: Path) -> list[list[Finding]]:
        return await asyncio.gather(*(check(url, probe) for url in settings.engine.urls))

    # In the data directory, because that is what an engine on another machine or in a container can read.
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=settings.data_dir) as folder:
        probe = Path(folder)
        probe.chmod(0o755)
        subject.meta.save_probe(probe)
        return [finding for of_server in asyncio.run(check_all(probe)) for finding in of_server]


def _memory(subject: Subject, gpus: ReadGpus) -> Iterator[Finding]:
    settings = subject.settings
    gpu_readings = gpus().devices if settings.devices.train_on != "cpu" or _has_gpu_engine(settings) else ()
    device = _smallest([d for d in suitable_devices(gpu_readings, settings.devices.train_on) if d.kind == "cuda"])
    training, engine = trainer_need(subject, device), engine_need(subject)
    peak = measured_peak(settings, subject.files.name, "cuda" if device is not None else "cpu")
    serves_on_gpu = _has_gpu_engine(settings)
    gpu_names = [device.id for device in gpu_readings if device.kind == "cuda"]
    share = _engine_share(settings, gpu_names) if serves_on_gpu and not settings.engine.urls else 0.0
    if device is not None:
        # On the engine's own GPU both have to fit: a training samples while it trains.
        reserved = int(share * device.memory_total) if start.trains_on_engine_gpu(settings, gpu_names) else 0
        yield _fits(
            "memory of the trainer",
            training,
            Capacity(device.name, device.memory_total, reserved),
            _gpu_fix(share),
            peak,
        )
    else:
        ram = psutil.virtual_memory().total
        engine_bytes = 0 if serves_on_gpu or settings.engine.urls else engine.minimum
        count = settings.training.at_once
        yield _fits(
            f"memory of {count} trainings" if count > 1 else "memory of the trainer",
            type(training)(training.minimum * count, training.estimate * count),
            Capacity("the machine", ram, engine_bytes),
            "training.at_once = 1, or a lower training.max_length and training.micro_batch_tokens",
            peak,
        )
    if settings.engine.urls:
        return
    if serves_on_gpu and (card := _smallest(list(gpu_readings))) is not None:
        place = f"{share:.0%} of {card.name}"
        yield _fits(
            "memory of the engine", engine, Capacity(place, int(card.memory_total * share)), "a higher engine.gpu_share"
        )
    elif not serves_on_gpu:
        ram = psutil.virtual_memory().total
        yield _fits(
            "memory of the engine", engine, Capacity("the machine", ram), "engine.max_length, or a smaller model"
        )


def trainer_need(subject: Subject, gpu: DeviceReading | None) -> "MemoryNeed":
    """Return the memory of one training process on this GPU, or on the CPU with its copy of the base for rollouts."""
    from traced.training.footprint import BFLOAT16, CUDA_BYTES, FLOAT32, MemoryNeed

    training, sizes = subject.settings.training, subject.footprint
    row = min(training.max_length, sizes.positions)
    # A GPU's memory sets the size of a pass, down to one rollout; a sharded pass that does not fit is not repeated.
    tokens = row if gpu and not training.shard else max(row, training.micro_batch_tokens)
    recompute = training.gradient_checkpointing == "on" or (training.gradient_checkpointing == "auto" and bool(gpu))
    need = sizes.training(
        tokens,
        weight_bytes=BFLOAT16 if gpu else FLOAT32,
        recompute=recompute,
        shards=training.processes if training.shard else 1,
    )
    copies = CUDA_BYTES if gpu else 0
    if start.backend(subject.settings) == "embedded":
        copies += sizes.parameters * (BFLOAT16 if gpu else FLOAT32)
    return MemoryNeed(need.minimum + copies, need.estimate + copies)


def measured_peak(settings: Settings, model: str, device: str) -> str:
    """Return the peak of the last training of this model on such a device with these settings, in words; "" without."""
    # Imported here because a check without a store does without its libraries.
    from store.database import connect, read_session
    from store.errors import StoreError
    from store.repositories.adapters import newest_iterations

    if not settings.store.url and not (settings.data_dir / "traced.db").exists():
        return ""
    training = settings.training
    config = {"max_length": training.max_length, "processes": training.processes, "device": device}
    try:
        store = connect(settings.store_url)
        try:
            with read_session(store) as session:
                iterations = newest_iterations(session, model, config, PEAK)
        finally:
            store.dispose()
    except StoreError:
        # What is wrong with the store is another check's finding.
        return ""
    if not iterations:
        return ""
    highest = max((entry.values for entry in iterations), key=lambda values: values[PEAK])
    size, tokens = highest[PEAK] / GIB, highest["pass_tokens"]
    return f"; a process of the last training took {size:.1f} GiB, in passes of up to {tokens:,.0f} tokens (measured)"


def engine_need(subject: Subject) -> "MemoryNeed":
    """Return the memory of the engine with its adapters: at least one conversation, likely ``engine.max_batch``."""
    from traced.training.footprint import BFLOAT16, FLOAT32

    settings, sizes = subject.settings, subject.footprint
    return sizes.serving(
        start.max_adapters(settings),
        min(settings.engine.max_length, sizes.positions),
        weight_bytes=BFLOAT16 if _has_gpu_engine(settings) else FLOAT32,
        sequences=settings.engine.max_batch if start.backend(settings) == "embedded" else 1,
    )


def _has_gpu_engine(settings: Settings) -> bool:
    if start.backend(settings) != "vllm" or settings.engine.urls:
        return False
    python = start.find_vllm_python(settings)
    return python is not None and detect_build(str(python)).gpu


def _engine_share(settings: Settings, gpus: Sequence[str]) -> float:
    return _number(settings.engine.vllm_args, UTILIZATION, start.gpu_share(settings, gpus))


def _gpu_fix(engine_share: float) -> str:
    lower = "a lower training.max_length, several GPUs (training.processes, training.shard), or a smaller model"
    return f"a lower engine.gpu_share leaves room beside the engine; or {lower}" if engine_share else lower


def _smallest(devices: Sequence[DeviceReading]) -> DeviceReading | None:
    return min(devices, key=lambda device: device.memory_total, default=None)


@dataclass(frozen=True)
class Capacity:
    """Memory of a place in bytes, and what the engine reserves of it."""

    place: str
    total: int
    reserved: int = 0


def _fits(name: str, need: "MemoryNeed", capacity: Capacity, fix: str, peak: str = "") -> Finding:
    free = capacity.total - capacity.reserved
    note = f", {capacity.reserved / GIB:.1f} GiB of it for the engine" if capacity.reserved else ""
    observed = (
        f"about {need.estimate / GIB:.1f} GiB (estimated){peak}; "
        f"{capacity.place} has {capacity.total / GIB:.1f} GiB{note}"
    )
    if need.minimum > free:
        return Finding(name, False, f"at least {need.minimum / GIB:.1f} GiB, {observed}", fix)
    return Finding(name, True, observed, warning=f"may not fit: {fix}" if need.estimate > TIGHT * free else "")


def _value(settings: Settings, key: str) -> int:
    section, _, name = key.partition(".")
    return int(getattr(getattr(settings, section), name))


def _default(key: str) -> int:
    section, _, name = key.partition(".")
    return int(getattr(Settings.model_fields[section].default, name))
