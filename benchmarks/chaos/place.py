"""A real ``traced up`` on a data directory of its own: started, asked, killed, started again as a service manager does.

``SMALL`` makes a cycle that learns next to nothing, and a gate that lets every adapter pass, so that each cycle comes
by a person's decision. Invariants: every process of the service carries ``marks`` in its environment, so that none is
ever taken for another's; what it prints goes to ``service.log`` beside the data directory. How it fails:
``RuntimeError`` with the end of that log when the service does not come up.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Engine

from store.database import open_store
from traced.client import Client, NoDaemon, default_socket
from traced.client.models import Status
from traced.config.settings import Settings, load_settings

READY_S = 600.0
POLL_S = 0.1
SMALL = """
[engine]
threads = 1
start_timeout_s = 300.0
[collect]
episodes = {episodes}
[analysis]
runs = 2
[admission]
seeds = 4
base_seeds = 4
base_rollouts = 4
mixed = 0.0
mean_low = 0.0
mean_high = 1.0
[synthesis]
attempts = 1
[training]
iterations = 2
groups = 2
rollouts = 4
validation_seeds = 4
lr = 0.005
[gate]
seeds = 12
max_rounds = 1
environment_margin = -1.0
target_margin = -1.0
regression_margin = 1.0
[composition]
seeds = 4
[test]
seeds = 4
[devices]
idle_s = 0
cpu_utilisation = 1.0
cpu_memory = 1.0
[executor]
backoff_s = 0.2
backoff_cap_s = 2.0
grace_s = 5.0
failures = 100
"""

T = TypeVar("T")


@dataclass
class Place:
    """One data directory and the service on it; ``variables`` are added to the environment of the service."""

    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    store_url: str = ""
    settings: str = SMALL.format(episodes=100)
    niceness: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    def __post_init__(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        store = f'[store]\nurl = "{self.store_url}"\n' if self.store_url else ""
        (self.data_dir / "traced.toml").write_text(self.settings + store)

    @property
    def data_dir(self) -> Path:
        """The data directory."""
        return self.folder / "data"

    @property
    def marks(self) -> dict[str, str]:
        """Environment variables that identify the processes of this service."""
        return {"TRACED_DATA_DIR": str(self.data_dir)}

    @property
    def pid(self) -> int:
        """Process id of the service."""
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the service's process runs."""
        return self.process is not None and self.process.poll() is None

    def read_settings(self) -> Settings:
        """The settings in its file."""
        return load_settings(self.data_dir)

    def open_store(self) -> Engine:
        """The store, opened by the caller, who closes it."""
        return open_store(self.read_settings().store_url)

    def start(self) -> None:
        """Start the service and wait until it answers."""
        environment = {**os.environ, **self.variables, **self.marks}
        with (self.folder / "service.log").open("ab") as log:
            command = ["nice", "-n", str(self.niceness), sys.executable, "-m", "traced", "up"]
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + READY_S
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not come up: {self.last_lines()}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            self.status()
        except NoDaemon:
            return False
        return True

    def kill(self) -> None:
        """Kill the service with SIGKILL; its child processes are not touched."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self, timeout_s: float = 120.0) -> int:
        """Stop the service with SIGTERM and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def status(self) -> Status:
        """The status of the service. Raises ``NoDaemon``."""
        return self.ask(lambda client: client.status())

    def ask(self, request: Callable[[Client], Awaitable[T]], timeout_s: float = 30.0) -> T:
        """Send a request to the service. Raises the errors of the client."""

        async def send() -> T:
            async with Client(default_socket(self.data_dir), timeout_s=timeout_s) as client:
                return await request(client)

        return asyncio.run(send())

    def last_lines(self, count: int = 12) -> str:
        """The end of the service's log."""
        path = self.folder / "service.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else ""
