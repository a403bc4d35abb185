"""The routers that are compared, each as a process of its own in front of the same engine."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.engines.stored_versions import ACTOR, WEIGHTS, save_versions
from store.database import open_store, sqlite_url, write_session
from store.repositories import promotions
from traced.gateway.access import create_key
from traced.registry.decision_rules import Action

ROOT = Path(__file__).parents[2]
PEERS = ("litellm[proxy]==1.106.2", "vllm-router==0.1.17")
START_S = 120.0
KEY = "sk-bench"
ADAPTERS = ("returns@v1", "refunds@v1")
# A key of LiteLLM is its master key; keys of its own need a database. Its log is a callback that writes to a file.
LITELLM = """
model_list:
  - model_name: base
    litellm_params: {{model: openai/base, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{num_retries: 0, telemetry: false{callbacks}}}
{keys}
"""
LITELLM_LOG = """
import json
from litellm.integrations.custom_logger import CustomLogger

class RequestLog(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        line = {"messages": kwargs.get("messages"), "response": response_obj, "at": str(start_time)}
        with open(%r, "a") as stream:
            stream.write(json.dumps(line, default=str) + "\\n")

request_log = RequestLog()
"""


@dataclass(frozen=True)
class RunningRouter:
    """A router's port, and the key that its requests need ("" for none)."""

    port: int
    key: str = ""


def peers(folder: Path) -> Path:
    """An environment with the other routers, made where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not (folder / "bin" / "litellm").exists() or not (folder / "bin" / "vllm-router").exists():
        subprocess.run([str(python), "-m", "pip", "install", "-q", *PEERS], check=True)
    return folder


def free_port() -> int:
    """A port that is free now."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def engine() -> Iterator[int]:
    """The engine that answers at once; gives its port."""
    port = free_port()
    code = (
        "import asyncio, sys; from benchmarks.serving.wire import AtOnce\n"
        "async def main():\n"
        "    server = await asyncio.get_running_loop().create_server(AtOnce, '127.0.0.1', int(sys.argv[1]))\n"
        "    await server.serve_forever()\n"
        "asyncio.run(main())"
    )
    with _running([sys.executable, "-c", code, str(port)], f"http://127.0.0.1:{port}/health", Path(os.devnull)):
        yield port


@contextmanager
def traced(engine_port: int, folder: Path, *, keys_and_records: bool) -> Iterator[RunningRouter]:
    """Our router with two live adapters; with a key, and recording into SQLite, or without either."""
    port = free_port()
    key = _installed(folder, keys_and_records=keys_and_records)
    settings = [f"serving.port={port}", f'engine.urls=["http://127.0.0.1:{engine_port}"]', "engine.backend=openai"]
    settings += ["routing.router=labels", *([] if keys_and_records else ["serving.record=0"])]
    command = [sys.executable, "-m", "traced", "serve", "--data-dir", str(folder)]
    command += [word for setting in settings for word in ("--set", setting)]
    with _running(command, f"http://127.0.0.1:{port}/ready", folder / "serve.log"):
        router = RunningRouter(port, key)
        _wait_for_adapters(router, ADAPTERS)
        yield router


def _installed(folder: Path, *, keys_and_records: bool) -> str:
    """Make a data directory with live adapters, whose weights the engine does not read; returns a key or ""."""
    paths = {(name.partition("@")[0], 1): folder / "adapters" / name for name in ADAPTERS}
    for path in paths.values():
        path.mkdir(parents=True)
        (path / WEIGHTS).touch()
    store = open_store(sqlite_url(folder / "traced.db"))
    try:
        save_versions(store, paths)
        at = datetime.now(UTC)
        with write_session(store) as session:
            for name in ADAPTERS:
                promotions.promote(session, name, actor=ACTOR, at=at)
            return create_key(session, Action(ACTOR, "local", at, ""), "benchmark", 0) if keys_and_records else ""
    finally:
        store.dispose()


def _wait_for_adapters(router: RunningRouter, names: Collection[str]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{router.port}/v1/models")
    request.add_header("Authorization", f"Bearer {router.key}")
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(request, timeout=10) as answer:
            if {*names} <= {model["id"] for model in json.load(answer)["data"]}:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the router does not offer {', '.join(sorted(names))}")


@contextmanager
def litellm(engine_port: int, folder: Path, venvs: Path, *, keys_and_records: bool) -> Iterator[RunningRouter]:
    """LiteLLM's proxy; with its master key and a log of requests, or without either."""
    port = free_port()
    folder.mkdir()
    (folder / "bench_log.py").write_text(LITELLM_LOG % str(folder / "requests.jsonl"))
    config = folder / "litellm.yaml"
    callbacks, keys = "", "general_settings: {dangerously_permit_weak_or_unset_master_key: true}"
    if keys_and_records:
        callbacks, keys = ", callbacks: bench_log.request_log", f"general_settings: {{master_key: {KEY}}}"
    config.write_text(LITELLM.format(engine=engine_port, callbacks=callbacks, keys=keys))
    command = [str(venvs / "bin" / "litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]
    with _running(command, f"http://127.0.0.1:{port}/health/liveliness", folder / "litellm.log"):
        yield RunningRouter(port, KEY if keys_and_records else "")


@contextmanager
def vllm_router(engine_port: int, folder: Path, venvs: Path) -> Iterator[RunningRouter]:
    """The vLLM project's router (Rust), which checks no keys of clients and has no log of requests."""
    port = free_port()
    folder.mkdir()
    command = [str(venvs / "bin" / "vllm-router"), "--worker-urls", f"http://127.0.0.1:{engine_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port())]
    with _running(command, f"http://127.0.0.1:{port}/health", folder / "vllm-router.log"):
        yield RunningRouter(port)


@contextmanager
def _running(command: list[str], ready: str, log: Path) -> Iterator[None]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    with log.open("ab") as log_stream:
        process = subprocess.Popen(command, stdout=log_stream, stderr=log_stream, env=environment, cwd=ROOT)
    try:
        _wait(process, ready, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", ready: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(ready, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not become ready: {log.read_text()[-2000:] if log.is_file() else ''}")
