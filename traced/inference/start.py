"""Start or connect to the engine that the settings name: the only place that does, for every stage and the router.

``start`` starts an engine process. ``connect`` returns the ``RunningEngine`` of a cycle: the servers at
``engine.urls``, the vLLM that another process of the data directory has recorded (``shared_engine``), or a process of
its own. Errors: ``EngineStartError``, ``ModelError``, and ``RequestError`` for servers
that do not fit.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from traced.config.settings import Settings
from traced.core.files import publish_file
from traced.core.gpus import gpu_ids
from traced.inference.adapter_base import base_check
from traced.inference.adapter_use import name_on_engine, names_in_use, record_use, unload_unused
from traced.inference.chat_format import ChatFormat, load_chat_format
from traced.inference.client import BASE, EngineClient
from traced.inference.engine_process import EngineProcess, VllmOptions, free_port, start_embedded, start_vllm
from traced.inference.engine_urls import engine_urls
from traced.inference.errors import EngineError, EngineStartError, RequestError
from traced.inference.model_files import BUNDLED_MODELS, adapter_digest, resolve_model
from traced.inference.policies import ChatPolicy, Policy, TokenPolicy
from traced.inference.replicas import Replicas
from traced.inference.shared_engine import EngineNeeds, SharedEngine, start_lock, start_recorded
from traced.processes.child_process import ROOT

BackendInUse = Literal["embedded", "vllm", "openai"]
# Where make vllm and make vllm-cpu install vLLM, relative to the working directory or the source tree.
VLLM_PYTHON = Path(".vllm/bin/python")
VLLM_VARIABLE = "TRACED_VLLM_PYTHON"
# Adapters of a training that an engine holds besides the live ones: the current and the previous iteration's, and with
# training.overlap the next one's.
TRAINING_ADAPTERS = 2
# vLLM's own default, and what leaves a trainer on the same GPU about as much.
WHOLE_GPU, SHARED_GPU, ALTERNATING_GPU = 0.9, 0.45, 0.8


def backend(settings: Settings) -> BackendInUse:
    """Return the backend that the settings mean; "auto" depends on the URLs, the model and the installed vLLM."""
    engine = settings.engine
    if engine.backend != "auto":
        return engine.backend
    is_large = settings.model.spec not in BUNDLED_MODELS and find_vllm_python(settings) is not None
    return "vllm" if engine.urls or is_large else "embedded"


def find_vllm_python(settings: Settings) -> Path | None:
    """Return the Python interpreter that has vLLM, or None: the setting, the variable, or the environment of make."""
    configured = settings.engine.vllm_python or os.environ.get(VLLM_VARIABLE, "")
    if configured:
        return Path(configured)
    return next((folder / VLLM_PYTHON for folder in (Path.cwd(), ROOT) if (folder / VLLM_PYTHON).exists()), None)


def start(settings: Settings, port: int = 0) -> EngineProcess:
    """Start an engine that serves the base model on the loopback, and wait until it answers.

    Args:
        port: 0 means a free port.

    Raises:
        EngineStartError: The engine did not start, or the backend is a server that traced does not start.
        ModelError: The model of the settings is missing or incomplete.
    """
    name = backend(settings)
    if name == "openai":
        raise EngineStartError('engine.backend = "openai" needs a running server', hint="engine.urls")
    if name == "embedded":
        return start_embedded_engine(settings, port)
    model = resolve_model(settings.model.spec, settings.data_dir)
    python = find_vllm_python(settings)
    chat_format = load_chat_format(model.path)
    parser = settings.engine.tool_parser
    options = VllmOptions(
        model.path,
        max_adapters(settings),
        settings.training.lora_r,
        settings.engine.max_length,
        chat_format.tool_parser if parser == "auto" else parser,
        settings.engine.vllm_args,
        settings.serving.sleep_for_training,
        _chat_template(settings, chat_format),
        chat_format.template_options,
        chat_format.reasoning_parser,
        gpu_share(settings, gpu_ids()),
    )
    return start_vllm(
        options,
        data_dir=settings.data_dir,
        port=port or free_port(),
        timeout_s=settings.engine.start_timeout_s,
        python=str(python or sys.executable),
    )


def start_embedded_engine(settings: Settings, port: int = 0) -> EngineProcess:
    """Start the embedded engine, whatever the backend of the settings."""
    limits = settings.engine
    return start_embedded(
        resolve_model(settings.model.spec, settings.data_dir).path,
        data_dir=settings.data_dir,
        port=port,
        threads=settings.threads,
        max_batch=limits.max_batch,
        max_length=limits.max_length,
        timeout_s=limits.start_timeout_s,
    )


def gpu_share(settings: Settings, gpus: Sequence[str]) -> float:
    """Return the share of a GPU's memory that vLLM takes.

    Args:
        gpus: The UUIDs of the machine's GPUs; engines take the first one, trainings the last ones.
    """
    if settings.engine.gpu_share:
        return settings.engine.gpu_share
    if not trains_on_engine_gpu(settings, gpus):
        return WHOLE_GPU
    return ALTERNATING_GPU if alternates_with_training(settings, gpus) else SHARED_GPU


def trains_on_engine_gpu(settings: Settings, gpus: Sequence[str]) -> bool:
    """Return whether trainings use the GPU of the engine; ``gpus`` as for ``gpu_share``."""
    train_on = settings.devices.train_on
    if train_on in gpus:
        return train_on == gpus[0]
    return train_on != "cpu" and len(gpus) <= settings.training.processes


def sleeps_during_updates(settings: Settings, training_gpus: Sequence[str], gpus: Sequence[str]) -> bool:
    """Return whether the engine sleeps during the updates of a training, because it is a vLLM on one of its GPUs.

    Args:
        training_gpus: The UUIDs of the training's GPUs.
        gpus: Those of the machine; an engine that traced starts takes the first one, servers at ``engine.urls`` any.
    """
    if not settings.serving.sleep_for_training or settings.training.overlap or backend(settings) != "vllm":
        return False
    engine_gpus = settings.serving.devices or (gpus if settings.engine.urls else gpus[:1])
    return any(gpu in engine_gpus for gpu in training_gpus)


def alternates_with_training(settings: Settings, gpus: Sequence[str]) -> bool:
    """Return whether the engine and the base of a training hold the memory of a GPU in turns.

    The base of a sharded training stays on its GPUs.

    Args:
        gpus: The UUIDs of the machine's GPUs, as for ``gpu_share``.
    """
    if settings.training.shard or not gpus or not trains_on_engine_gpu(settings, gpus):
        return False
    return sleeps_during_updates(settings, gpus[:1], gpus)


def needs_of(settings: Settings) -> EngineNeeds:
    """Return what a process with these settings needs of an engine that several processes share.

    It has one training at most: a service runs each training in a process of its own.
    """
    model = resolve_model(settings.model.spec, settings.data_dir)
    adapters = settings.serving.max_adapters + _training_adapters(settings)
    return EngineNeeds(model.path, adapters, settings.training.lora_r)


def start_for_router(settings: Settings, port: int) -> EngineProcess:
    """Start the router's engine, and record a vLLM so that stages use it as well."""
    if backend(settings) != "vllm":
        return start(settings, port)
    with start_lock(settings.data_dir):
        return start_recorded(settings.data_dir, needs_of(settings), partial(start, settings, port))


def max_adapters(settings: Settings) -> int:
    """Return the number of adapters that an engine of these settings holds: live ones and those of trainings."""
    return settings.serving.max_adapters + settings.training.at_once * _training_adapters(settings)


def _training_adapters(settings: Settings) -> int:
    return TRAINING_ADAPTERS + settings.training.overlap


def _chat_template(settings: Settings, chat_format: ChatFormat) -> Path:
    """Write the template that training uses to a file, so that vLLM's chat endpoint renders conversations alike."""
    digest = hashlib.sha256(chat_format.template.encode()).hexdigest()[:12]
    path = settings.data_dir / "models" / f"chat-template-{digest}.jinja"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_file(path, chat_format.template)
    return path


@dataclass
class RunningEngine:
    """The engine of a cycle.

    Args:
        chat_format: The model's chat format; None for a backend that renders conversations itself.
        max_length: Maximum tokens of a conversation.
        process: The engine's process if it is this one's alone (the embedded engine).
        check_adapter: Raises ``ModelError`` for the folder of an adapter of another base model.
        shared: The vLLM that the processes of the data directory share.
        served_names: The name under which the engine serves an adapter, by the adapter's own name.
    """

    backend: BackendInUse
    replicas: Replicas
    data_dir: Path
    chat_format: ChatFormat | None
    max_length: int
    process: EngineProcess | None = None
    check_adapter: Callable[[Path], None] = lambda path: None
    shared: SharedEngine | None = None
    monitor: "asyncio.Task[None] | None" = None
    served_names: dict[str, str] = field(default_factory=dict)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def client(self) -> EngineClient:
        """Return the client of the first engine."""
        return self.replicas.clients[0]

    @property
    def urls(self) -> list[str]:
        """Return the URLs of all engines."""
        return [client.url for client in self.replicas.clients]

    def policy(self, model: str, temperature: float, max_tokens: int) -> Policy:
        """Return the policy of the base model or of an adapter that ``serve`` has loaded."""
        if self.chat_format is None:
            return ChatPolicy(self.replicas, temperature, max_tokens)
        adapter = None if model == BASE else self.served_names[model]
        return TokenPolicy(self.replicas, self.chat_format, adapter, self.max_length, temperature, max_tokens)

    async def serve(self, name: str, path: Path) -> None:
        """Serve an adapter directory on every engine; one that is served already is not loaded again.

        Raises:
            RequestError: The backend has no adapters, or an engine refuses this one.
            ModelError: The adapter was trained on another base model.
            EngineError: No engine answers.
        """
        if self.backend == "openai":
            raise RequestError(
                f'engine.backend = "openai" serves no adapters, so {name} cannot be evaluated',
                hint='engine.backend = "vllm"',
            )
        async with self._lock:
            if name not in self.served_names:
                await asyncio.to_thread(self.check_adapter, path)
                served_name = name_on_engine(name, adapter_digest(path))
                await self._check_slots(served_name)
                if self.process is None:
                    record_use(self.data_dir, {*self.served_names.values(), served_name})
                await self.replicas.load_adapter(served_name, path)
                self.served_names[name] = served_name

    async def unload(self, name: str) -> None:
        """Stop serving an adapter, which frees its slot; one that is not served is passed over."""
        async with self._lock:
            served_name = self.served_names.pop(name, None)
            if served_name is not None:
                await self.replicas.unload_adapter(served_name)
                if self.process is None:
                    record_use(self.data_dir, set(self.served_names.values()))

    async def close(self) -> None:
        """Unload the adapters from servers that go on, close the connections, and stop a process of its own."""
        if self.monitor is not None:
            self.monitor.cancel()
        is_owner = self.process is not None or (self.shared is not None and self.shared.process is not None)
        try:
            if self.process is None:
                record_use(self.data_dir, ())
            if not is_owner:
                for name in set(self.served_names.values()) - names_in_use(self.data_dir):
                    await self.replicas.unload_adapter(name)
            # The clients first: their open requests would raise errors if the engine stopped before.
            await self.replicas.aclose()
        finally:
            if self.process is not None:
                self.process.stop()
            if self.shared is not None:
                await asyncio.to_thread(self.shared.close)

    def use(self, url: str) -> None:
        """Send requests to the engine at this URL from now on."""
        # Requests that have lost the former engine are repeated, and the adapters are loaded again (``Replicas``).
        self.client.url = url

    async def _check_slots(self, name: str) -> None:
        """Raise ``RequestError`` if a shared engine has no slot left for another adapter."""
        if self.shared is None:
            return
        # With more adapters than slots, vLLM reassigns the slot of a running request (vLLM issue 47724).
        adapters = set((await self.client.bases_and_adapters())[1])
        slots = self.shared.needs.adapters
        if name not in adapters and len(adapters) >= slots:
            raise RequestError(
                f"the engine at {self.client.url} holds {len(adapters)} adapters, and {slots} is its maximum: "
                + ", ".join(sorted(adapters)),
                hint="raise serving.max_adapters",
            )


async def connect(settings: Settings) -> RunningEngine:
    """Return the engine of the settings, started if no servers are named; blocks until it answers."""
    name = backend(settings)
    process, shared = None, None
    urls = await engine_urls(settings)
    if not urls and name == "vllm":
        shared = SharedEngine(
            settings.data_dir, needs_of(settings), partial(start, settings), settings.engine.start_timeout_s
        )
        urls = [shared.connect()]
    elif not urls:
        process = start(settings)
        urls = [process.url]
    key = Path(settings.engine.key_file).read_text().strip() if settings.engine.key_file else ""
    clients = [EngineClient(url, silence_s=settings.engine.silence_s, key=key) for url in urls]
    # A shared engine that has ended is started again, which takes its time.
    patience_s = settings.engine.start_timeout_s if shared else settings.engine.patience_s
    replicas = Replicas(clients, patience_s=patience_s)
    engine = RunningEngine(
        name, replicas, settings.data_dir, None, settings.engine.max_length, process, base_check(settings), shared
    )
    if shared is not None:
        engine.monitor = asyncio.create_task(shared.follow(engine.use))
    try:
        for client in clients:
            client.base = settings.engine.model or (await _models(client))[0]
        if name != "openai":
            engine.chat_format = load_chat_format(resolve_model(settings.model.spec, settings.data_dir).path)
            engine.max_length = min([engine.max_length, *[await _context_length(client) for client in clients]])
        if process is None:
            await unload_unused(clients, settings.data_dir)
    except BaseException:
        await engine.close()
        raise
    return engine


async def _models(client: EngineClient) -> list[str]:
    try:
        models = await client.models()
    except EngineError as error:
        # As for an engine of traced's own: an outage, and no fault of what a stage works on.
        raise EngineStartError(error.message, hint="engine.urls: is the server running?") from error
    if not models:
        raise RequestError(f"{client.url} lists no model", hint="engine.model")
    return models


async def _context_length(client: EngineClient) -> int:
    return await client.context_length() or sys.maxsize
