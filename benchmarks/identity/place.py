"""The place of the simulation: a store with one version on a canary, API keys, the engine, and ``traced serve``.

Each process is real and a child of this one. The router keeps its port over restarts. What it writes is read from the
store after it has ended. Fails with ``RuntimeError`` and the end of its log where a process does not start.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Engine
from sqlmodel import select

from benchmarks.identity.engine import BASE
from benchmarks.serving.proxies import free_port
from store.database import open_store, read_session, sqlite_url, write_session
from store.records import (
    AdapterVersion,
    Approval,
    Cycle,
    CycleState,
    Decision,
    EnvironmentRecord,
    Promotion,
    PromotionState,
    RouterKey,
    RunState,
    TrainingRun,
)
from store.repositories import adapters, capabilities, cycles, environments, gates, promotions, serving
from store.service_tables import ConversationRow, ExchangeRow, FeedbackRow
from store.tables import TrajectoryRow
from store.types import Capability, GateAnswer, GateResult
from traced.config.settings import load_settings
from traced.gateway.recorder import Recorder

ROOT = Path(__file__).parents[2]
START_S = 120.0
STOP_S = 90.0
START = datetime(2026, 1, 1, tzinfo=UTC)
ACTOR = "benchmark"
CANARY = "skill-0@v1"
CANARY_SHARE = 0.05
# Never through a proxy.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# The machine may be slow, which must not decide a conversation's arm.
SETTINGS = {
    "routing.router": "labels",
    "serving.routing_timeout_s": "60",
    "serving.queue_s": "120",
    # Feedback is evidence for the canary; its share must not change during the simulation.
    "promotion.min_samples": "1000000",
}


@dataclass(frozen=True)
class StoredExchange:
    """What the store has of one exchange, after settlement."""

    id: str
    conversation_id: str
    key: str
    response_id: str
    status: int
    model: str
    trajectory_id: str | None
    at: datetime


@dataclass(frozen=True)
class StoredTraffic:
    """What the store has after the run.

    Args:
        exchanges: By id.
        trials: The conversations that take part in the canary.
        feedback: (conversation id, response id) of each stored feedback.
        outcomes: The outcome of each trajectory.
    """

    exchanges: dict[str, StoredExchange]
    trials: frozenset[str]
    feedback: list[tuple[str, str]]
    outcomes: dict[str, str]


@dataclass
class Place:
    """The running processes, and the API keys by name."""

    data_dir: Path
    store: Engine
    keys: dict[str, str]
    engine_port: int
    router_port: int
    router: "subprocess.Popen[bytes] | None" = field(default=None)
    stop_seconds: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Return the router's URL."""
        return f"http://127.0.0.1:{self.router_port}"

    def start_router(self) -> None:
        """Start the router and wait until it offers the canary."""
        pairs = {"serving.port": str(self.router_port), **SETTINGS}
        pairs["engine.urls"] = json.dumps([f"http://127.0.0.1:{self.engine_port}"])
        command = [sys.executable, "-m", "traced", "serve", "--data-dir", str(self.data_dir)]
        command += [part for name, value in pairs.items() for part in ("--set", f"{name}={value}")]
        self.router = _start(command, self.data_dir / "serve.log")
        headers = {"Authorization": f"Bearer {next(iter(self.keys.values()))}"}
        _wait(self.router, urllib.request.Request(f"{self.url}/v1/models", headers=headers), CANARY, self.data_dir)

    def stop_router(self) -> None:
        """End the router with SIGTERM, as an update does; it stores what it recorded."""
        if self.router is not None:
            started = time.monotonic()
            _stop(self.router)
            self.router = None
            self.stop_seconds.append(time.monotonic() - started)

    def read_traffic(self) -> StoredTraffic:
        """Settle all conversations and return what the store has; the router must have ended."""
        recorder = Recorder(load_settings(self.data_dir, {"serving.silence_s": 0.0}), self.store)
        with read_session(self.store) as session:
            remaining = serving.silent_conversations(session, silent_since=datetime.now(UTC), limit=1)
        while remaining:
            recorder.settle()
            with read_session(self.store) as session:
                remaining = serving.silent_conversations(session, silent_since=datetime.now(UTC), limit=1)
        columns = (
            ExchangeRow.id,
            ExchangeRow.conversation_id,
            ExchangeRow.key_id,
            ExchangeRow.response_id,
            ExchangeRow.status,
            ExchangeRow.model,
            ExchangeRow.trajectory_id,
            ExchangeRow.at,
        )
        with read_session(self.store) as session:
            rows = session.execute(select(*columns)).all()  # type: ignore[call-overload]  # SQLModel types four columns
            exchanges = {row[0]: StoredExchange(*row) for row in rows}
            routes = session.exec(select(ConversationRow.id, ConversationRow.trial)).all()
            feedback = session.exec(select(FeedbackRow.conversation_id, FeedbackRow.response_id)).all()
            outcomes = session.exec(select(TrajectoryRow.id, TrajectoryRow.outcome)).all()
        trials = frozenset(conversation_id for conversation_id, trial in routes if trial is not None)
        return StoredTraffic(exchanges, trials, [(row[0], row[1]) for row in feedback], dict(outcomes))


@contextlib.contextmanager
def open_place(data_dir: Path, key_names: Sequence[str]) -> Iterator[Place]:
    """Prepare a store in ``data_dir`` with these keys and run the engine and the router as long as the body does."""
    store = open_store(sqlite_url(data_dir / "traced.db"))
    engine_port = free_port()
    engine = None
    place = Place(data_dir, store, _prepare(store, data_dir, key_names), engine_port, free_port())
    try:
        engine = _start([sys.executable, "-m", "benchmarks.identity.engine", str(engine_port)], data_dir / "engine.log")
        _wait(engine, urllib.request.Request(f"http://127.0.0.1:{engine_port}/v1/models"), BASE, data_dir)
        place.start_router()
        yield place
    finally:
        place.stop_router()
        if engine is not None:
            _stop(engine)
        store.dispose()


def _prepare(store: Engine, data_dir: Path, key_names: Sequence[str]) -> dict[str, str]:
    """Store an approved version on its canary, without a live version, and the keys; returns the keys by name."""
    skill = CANARY.partition("@")[0]
    folder = data_dir / "adapter"
    folder.mkdir()
    # The scripted engine never reads it.
    (folder / "adapter_model.safetensors").write_bytes(b"")
    digest = hashlib.sha256(b"").hexdigest()
    keys = {name: f"traced-{hashlib.sha256(name.encode()).hexdigest()}" for name in key_names}
    with write_session(store) as session:
        cycles.save_cycle(session, Cycle("c1", "desk", BASE, 0, {}, CycleState.RUNNING, START))
        capability = Capability(skill, "Deliveries", "Questions on deliveries.", "a delivery is late", "", "")
        capabilities.save_capabilities(session, "c1", [capability])
        environments.save_environment(session, EnvironmentRecord(digest, "", "c1", skill, 0, "builtin", START))
        run = TrainingRun("r1", "c1", skill, digest, BASE, 0, {}, RunState.RUNNING, START)
        adapters.save_training_run(session, run)
        files = {"adapter_model.safetensors": digest}
        version = AdapterVersion(CANARY, skill, 1, str(folder), files, "c1", "r1", digest, START)
        adapters.save_adapter(session, version)
        gates.save_gate(session, GateResult(CANARY, GateAnswer.PASS, [], 1), cycle_id="c1", at=START)
        gates.save_approval(session, Approval(CANARY, Decision.APPROVED, ACTOR, START, ""))
        trial = Promotion(CANARY, PromotionState.CANARY, ACTOR, datetime.now(UTC), share=CANARY_SHARE)
        promotions.put_on_trial(session, trial)
        for name, key in keys.items():
            serving.save_key(session, RouterKey(name, hashlib.sha256(key.encode()).hexdigest(), 0, START))
    return keys


def _start(command: list[str], log_path: Path) -> "subprocess.Popen[bytes]":
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: "subprocess.Popen[bytes]", request: urllib.request.Request, expected: str, folder: Path) -> None:
    """Wait until the answer to ``request`` has the text ``expected``."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with _DIRECT.open(request, timeout=5) as response:
                if expected in response.read().decode():
                    return
        except OSError:
            pass
        time.sleep(0.05)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    process.kill()
    raise RuntimeError(f"{process.args!r} did not become ready:\n{logs}")
