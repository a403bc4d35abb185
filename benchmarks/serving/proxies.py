"""The routers that are compared, each as a process of its own in front of the same engine."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ("litellm[proxy]==1.106.2", "vllm-router==0.1.17")
START_S = 120.0
KEY = "sk-bench"
LITELLM = """
model_list:
  - model_name: base
    litellm_params: {{model: openai/base, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}
litellm_settings: {{num_retries: 0, telemetry: false}}
general_settings: {{master_key: {key}}}
"""


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
def traced(engine_port: int, folder: Path) -> Iterator[int]:
    """Our router, recording into SQLite."""
    port = free_port()
    (folder / "data").mkdir()
    pairs = {"port": port, "engine": "external", "engines": json.dumps([f"http://127.0.0.1:{engine_port}"])}
    command = [sys.executable, "-m", "traced", "serve", "--data-dir", str(folder / "data")]
    command += [part for name, value in pairs.items() for part in ("--set", f"serving.{name}={value}")]
    with _running(command, f"http://127.0.0.1:{port}/ready", folder / "traced.log"):
        yield port


@contextmanager
def litellm(engine_port: int, folder: Path, venvs: Path) -> Iterator[int]:
    """LiteLLM's proxy."""
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(LITELLM.format(engine=engine_port, key=KEY))
    command = [
        str(venvs / "bin" / "litellm"),
        "--config",
        str(config),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    with _running(command, f"http://127.0.0.1:{port}/health/liveliness", folder / "litellm.log"):
        yield port


@contextmanager
def vllm_router(engine_port: int, folder: Path, venvs: Path) -> Iterator[int]:
    """The vLLM project's router (Rust)."""
    port = free_port()
    command = [str(venvs / "bin" / "vllm-router"), "--worker-urls", f"http://127.0.0.1:{engine_port}"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error"]
    command += ["--prometheus-port", str(free_port())]
    with _running(command, f"http://127.0.0.1:{port}/health", folder / "vllm-router.log"):
        yield port


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
