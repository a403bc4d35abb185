"""The vLLM engine that the processes of a data directory share: the router, the stages of a cycle, and their trainings.

Two engines do not fit on one GPU, so a process that needs one uses the engine that another process has recorded, and
starts its own only if there is none. The record names the process that owns the engine: that process restarts it after
a crash, and stops it at its end. Then the next process that needs one starts it at the same address.

Invariants: one engine per data directory and base model is started at a time, under a lock that the kernel releases
when its holder dies; a record counts only while its owner lives, so ``kill -9`` leaves nothing that blocks. Exception:
the router always starts an engine of its own, also beside a stage's; from then on the next stage uses the router's.
How it fails: ``EngineStartError``. Not covered: owners on other machines or in other containers; embedded engines.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from traced.core.errors import TracedError
from traced.core.files import publish_file
from traced.core.ownership import is_alive, own_identity, process_of
from traced.inference.errors import EngineStartError
from traced.processes.child_process import RunningProcess

FOLDER = "engines"
LOCK = "start.lock"
POLL_S = 1.0
LOCK_POLL_S = 0.1
HEALTH_S = 1.0
RETRY_S = 30.0
log = logging.getLogger(__name__)


class StartedEngine(RunningProcess, Protocol):
    """An engine's process and its URL."""

    url: str

    @property
    def pid(self) -> int:
        """Return the process id."""
        ...


T = TypeVar("T", bound=StartedEngine)


@dataclass(frozen=True)
class EngineRecord:
    """A running engine.

    Args:
        owner: The identity of the process that started it.
        model: The directory of its base model.
        adapters: The number of adapters that it holds at most.
        rank: The highest LoRA rank that was asked for at its start.
    """

    url: str
    pid: int
    owner: str
    model: str
    adapters: int
    rank: int
    backend: str = "vllm"


@dataclass(frozen=True)
class EngineNeeds:
    """What a process needs of an engine; see ``EngineRecord``."""

    model: Path
    adapters: int
    rank: int

    def check(self, record: EngineRecord) -> None:
        """Raise ``EngineStartError`` if the recorded engine does not fit."""
        if record.rank < self.rank or record.adapters < self.adapters:
            raise EngineStartError(
                f"the engine at {record.url} holds {record.adapters} adapters up to rank {record.rank}, and "
                f"{self.adapters} up to rank {self.rank} are needed; it belongs to process {process_of(record.owner)}",
                hint="restart traced serve or the running cycle, so that the settings take effect",
            )


def record_file(data_dir: Path, model: Path) -> Path:
    """Return the file that names the engine with this base model."""
    return data_dir / FOLDER / f"{hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]}.json"


def read_record(file: Path) -> EngineRecord | None:
    """Return the engine of a record, None if there is none or its owner has ended."""
    try:
        record = EngineRecord(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if is_alive(record.owner) else None


def engine_owners(data_dir: Path) -> list[int]:
    """Return the ids of the live processes that own an engine of this data directory."""
    records = [read_record(file) for file in sorted((data_dir / FOLDER).glob("*.json"))]
    return [pid for record in records if record and (pid := process_of(record.owner))]


@contextlib.contextmanager
def start_lock(data_dir: Path, is_given_up: Callable[[], bool] = lambda: False) -> Iterator[bool]:
    """Hold the lock under which engines of a data directory start and stop; yields whether it is held.

    Args:
        is_given_up: Ends the wait for the lock without it when it returns True.
    """
    path = data_dir / FOLDER / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        while not is_given_up():
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(LOCK_POLL_S)
            else:
                yield True
                return
        yield False


def is_starting(data_dir: Path) -> bool:
    """Return whether a process holds the lock under which engines start and stop."""
    with contextlib.suppress(FileNotFoundError), (data_dir / FOLDER / LOCK).open("r") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def start_recorded(data_dir: Path, needs: EngineNeeds, start: Callable[[], T]) -> T:
    """Start an engine of this process and record it; the caller holds the lock."""
    engine = start()
    record = EngineRecord(
        engine.url, engine.pid, own_identity(), str(needs.model.resolve()), needs.adapters, needs.rank
    )
    publish_file(record_file(data_dir, needs.model), json.dumps(asdict(record)) + "\n")
    return engine


def stop_recorded(data_dir: Path, model: Path, stop: Callable[[], None]) -> None:
    """Stop this process's engine and delete its record; other processes that use it then start their own."""
    # Under the lock, so that the next engine starts once the memory of this one is free.
    with start_lock(data_dir):
        withdraw(data_dir, model)
        stop()


def withdraw(data_dir: Path, model: Path) -> None:
    """Delete the record of this process's engine; that of another process stays."""
    file = record_file(data_dir, model)
    record = read_record(file)
    if record is not None and record.owner == own_identity():
        file.unlink(missing_ok=True)


@dataclass
class SharedEngine:
    """The engine of a data directory from the view of one process, which owns it or uses another process's.

    Args:
        start: Starts an engine at a port (0: any free one) and returns when it answers.
        timeout_s: Seconds in which the owner of an engine that does not answer has to restart it.
    """

    data_dir: Path
    needs: EngineNeeds
    start: Callable[[int], StartedEngine]
    timeout_s: float
    url: str = ""
    process: StartedEngine | None = None
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def connect(self) -> str:
        """Return the URL of the engine, started if there is none; blocks until it answers.

        Raises:
            EngineStartError: It does not start, does not answer, or does not fit.
        """
        with self._mutex:
            with start_lock(self.data_dir, lambda: self._is_closed) as is_locked:
                if not is_locked:
                    return self.url
                record = self._usable_record()
                if record is None:
                    port = int(self.url.rpartition(":")[2]) if self.url else 0
                    self.process = start_recorded(self.data_dir, self.needs, lambda: self.start(port))
                    self.url = self.process.url
                    return self.url
            self.needs.check(record)
            self._wait_until_healthy(record)
            self.url = record.url
            log.info("using the engine at %s of process %s", record.url, process_of(record.owner))
            return self.url

    async def follow(self, on_change: Callable[[str], None]) -> None:
        """Keep an engine at hand until cancelled: restart this process's own, replace another one that has ended.

        Args:
            on_change: Called with the URL of every other engine.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_current():
                continue
            previous = self.url
            try:
                url = await asyncio.to_thread(self.connect)
            except (TracedError, OSError) as error:
                log.warning("there is no engine, the next attempt follows in %.0f s: %s", RETRY_S, error)
                await asyncio.sleep(RETRY_S)
                continue
            if url != previous:
                on_change(url)

    def close(self) -> None:
        """Stop the engine if this process owns it; others that use it then start their own."""
        # Set first, so that an attempt that waits does not start another engine.
        self._is_closed = True
        with self._mutex:
            if self.process is not None:
                stop_recorded(self.data_dir, self.needs.model, self.process.stop)
                self.process = None

    def _is_current(self) -> bool:
        if self.process is not None:
            return self.process.alive
        record = read_record(record_file(self.data_dir, self.needs.model))
        return record is not None and record.url == self.url

    def _usable_record(self) -> EngineRecord | None:
        if self.process is not None:
            # It has crashed: its record is this process's, which is alive.
            self.process.stop()
            self.process = None
            withdraw(self.data_dir, self.needs.model)
        return read_record(record_file(self.data_dir, self.needs.model))

    def _wait_until_healthy(self, record: EngineRecord) -> None:
        # Imported here because the daemon reads records and needs no client of engines.
        import httpx

        give_up_at = time.monotonic() + self.timeout_s
        while time.monotonic() < give_up_at and is_alive(record.owner):
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{record.url}/health", timeout=HEALTH_S, trust_env=False)
                if answer.status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)
        raise EngineStartError(
            f"the engine at {record.url} of process {process_of(record.owner) or '(ended)'} does not answer",
            hint="traced status; then run the same command again",
        )
