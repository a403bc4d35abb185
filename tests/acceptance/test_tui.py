"""The terminal interface in a terminal: tmux, a real service, an adapter approved by keys."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.chaos.place import Place
from benchmarks.seeded import Seeded, seed_store
from store.database import write_session
from store.repositories.cycles import pause_target
from tests.waiting import eventually

pytestmark = pytest.mark.optional


@dataclass
class Terminal:
    """A tmux session on a private server with this name."""

    name: str

    def tmux(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self.name, *words], capture_output=True, text=True, check=True, timeout=30)
        return done.stdout

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)

    def shows(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait_until(self, *texts: str) -> None:
        eventually(lambda: all(text in self.shows() for text in texts), message=self.shows)


@pytest.fixture
def service() -> Iterator[tuple[Place, Seeded]]:
    """A service on a seeded store with a paused target, so that it starts no cycle."""
    with tempfile.TemporaryDirectory(prefix="tu-", dir="/tmp") as folder:  # short: a socket's path is
        place = Place(Path(folder), settings="")
        store = place.open_store()
        seeded = seed_store(store, place.data_dir, datetime.now(UTC))
        with write_session(store) as session:
            pause_target(session, "desk", actor="a test", at=datetime.now(UTC))
        store.dispose()
        place.start()
        try:
            yield place, seeded
        finally:
            place.stop()


@pytest.fixture
def terminal(service: tuple[Place, Seeded]) -> Iterator[Terminal]:
    """A terminal that runs `traced tui`."""
    if shutil.which("tmux") is None:
        pytest.skip("no tmux is here")
    place, _ = service
    instance = Terminal(place.folder.name)
    command = [sys.executable, "-m", "traced", "tui", "--data-dir", str(place.data_dir)]
    instance.tmux("-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "40", *command)
    try:
        yield instance
    finally:
        subprocess.run(["tmux", "-L", instance.name, "kill-server"], capture_output=True, check=False, timeout=30)


def test_an_adapter_is_approved_by_keys_and_promoted(service: tuple[Place, Seeded], terminal: Terminal) -> None:
    place, seeded = service
    terminal.wait_until("● connected", "approve or reject", seeded.waiting, "7 Serving  8 Log")
    terminal.press("6")
    terminal.wait_until("a Approve")
    terminal.press("a")
    terminal.wait_until("Reason (stored")
    terminal.type("read the harmed ones")
    terminal.press("C-y")
    terminal.wait_until("✓ approved by", "● live")
    status = place.status()
    assert [adapter.live for adapter in status.adapters if adapter.name == seeded.waiting] == [True]
    assert status.waiting == []
    entry = place.ask(lambda client: client.audit(1))[0]
    assert (entry.action, entry.subject, entry.reason) == ("approve", seeded.waiting, "read the harmed ones")
    terminal.press("q")
    eventually(lambda: not place.alive or "no server" in _sessions(terminal), message=terminal.shows)
    assert place.alive  # closing it touches nothing
    assert place.status().state == "ready"


def _sessions(terminal: Terminal) -> str:
    done = subprocess.run(
        ["tmux", "-L", terminal.name, "list-sessions"], capture_output=True, text=True, check=False, timeout=30
    )
    return "no server" if done.returncode else done.stdout
