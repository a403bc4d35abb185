"""Start or connect to the engine that the settings name: the only place that does, for every stage and the router.

``start`` starts an engine process. ``connect`` returns the ``RunningEngine`` of a cycle: the servers at
``engine.urls``, or a process of its own. Errors: ``EngineStartError``, ``ModelError``, and ``RequestError`` for servers
that do not fit.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from traced.config.settings import Settings
from traced.core.files import publish_file
from traced.inference.adapter_base import base_check
from traced.inference.chat_format import ChatFormat, load_chat_format
from traced.inference.client import BASE, EngineClient
from traced.inference.engine_process import EngineProcess, VllmOptions, free_port, start_embedded, start_vllm
from traced.inference.errors import EngineError, EngineStartError, RequestError
from traced.inference.model_files import adapter_digest, resolve_model
from traced.inference.policies import ChatPolicy, Policy, TokenPolicy
from traced.inference.replicas import Replicas
from traced.processes.child_process import ROOT

BackendInUse = Literal["embedded", "vllm", "openai"]
# Where make vllm and make vllm-cpu install vLLM, relative to the working directory or the source tree.
VLLM_PYTHON = Path(".vllm/bin/python")
VLLM_VARIABLE = "TRACED_VLLM_PYTHON"
# Adapters of a training that an engine holds besides the live ones: the current and the previous iteration's.
TRAINING_ADAPTERS = 2


def backend(settings: Settings) -> BackendInUse:
    """Return the backend that the settings mean; "auto" depends on the URLs, the model and the installed vLLM."""
    engine = settings.engine
    if engine.backend != "auto":
        return engine.backend
    is_large = settings.model.spec != "bundled" and find_vllm_python(settings) is not None
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


def max_adapters(settings: Settings) -> int:
    """Return the number of adapters that an engine of these settings holds: live ones and a training's."""
    return settings.serving.max_adapters + TRAINING_ADAPTERS


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
        process: The engine's process if traced started it.
        check_adapter: Raises ``ModelError`` for the folder of an adapter of another base model.
        served: The name under which the engine serves an adapter, by the adapter's own name.
    """

    backend: BackendInUse
    replicas: Replicas
    chat_format: ChatFormat | None
    max_length: int
    process: EngineProcess | None = None
    check_adapter: Callable[[Path], None] = lambda path: None
    served: dict[str, str] = field(default_factory=dict)
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
        adapter = None if model == BASE else self.served[model]
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
            if name not in self.served:
                await asyncio.to_thread(self.check_adapter, path)
                # The name carries the digest, because a shared server may hold an adapter of the same name with other
                # weights. It differs from a version's name, so that the router does not unload it.
                served = f"{name}+{adapter_digest(path)[:12]}"
                await self.replicas.load_adapter(served, path)
                self.served[name] = served

    async def close(self) -> None:
        """Unload the adapters from servers that go on, close the connections, and stop a process of its own."""
        try:
            if self.process is None:
                for name in self.served.values():
                    await self.replicas.unload_adapter(name)
            # The clients first: their open requests would raise errors if the engine stopped before.
            await self.replicas.aclose()
        finally:
            if self.process is not None:
                self.process.stop()


async def connect(settings: Settings) -> RunningEngine:
    """Return the engine of the settings, started if no servers are named; blocks until it answers."""
    name = backend(settings)
    process = None if settings.engine.urls else start(settings)
    urls = [process.url] if process else settings.engine.urls
    key = Path(settings.engine.key_file).read_text().strip() if settings.engine.key_file else ""
    clients = [EngineClient(server_root(url), silence_s=settings.engine.silence_s, key=key) for url in urls]
    engine = RunningEngine(name, Replicas(clients), None, settings.engine.max_length, process, base_check(settings))
    try:
        for client in clients:
            client.base = settings.engine.model or (await _models(client))[0]
        if name != "openai":
            engine.chat_format = load_chat_format(resolve_model(settings.model.spec, settings.data_dir).path)
            engine.max_length = min([engine.max_length, *[await _context_length(client) for client in clients]])
    except BaseException:
        await engine.close()
        raise
    return engine


def server_root(url: str) -> str:
    """Return the server's root; users also write the URL with the /v1 of OpenAI's clients."""
    return url.rstrip("/").removesuffix("/v1")


async def _models(client: EngineClient) -> list[str]:
    try:
        models = await client.models()
    except EngineError as error:
        raise EngineError(error.message, hint="engine.urls: is the server running?") from error
    if not models:
        raise RequestError(f"{client.url} lists no model", hint="engine.model")
    return models


async def _context_length(client: EngineClient) -> int:
    return await client.context_length() or sys.maxsize
