"""A Docker engine of one's own beside the machine's: it can be killed without harm to anybody else.

Invariants: everything it keeps lies below one folder; it has no network set-up (sandboxes have none either). Needs
root and an installed dockerd. After ``kill`` its containers run on, as they do where a real engine dies.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil

START_S = 180.0
POLL_S = 0.1


def missing() -> str:
    """The missing requirement of a private Docker engine, or ""."""
    if os.geteuid():
        return "a Docker engine of one's own needs root"
    return "" if shutil.which("dockerd") else "dockerd is not installed; scripts/docker-engine.sh"


@dataclass
class Dockerd:
    """A private Docker engine in ``folder``, whose path must be short because it holds the socket."""

    folder: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def host(self) -> str:
        """Value of DOCKER_HOST."""
        return f"unix://{self.folder / 'docker.sock'}"

    @property
    def alive(self) -> bool:
        """Whether the engine's process runs."""
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        """Start the engine, again where it gave up (a busy machine), until it answers. Raises ``RuntimeError``."""
        deadline = time.monotonic() + START_S
        while not self._answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"dockerd did not start: {(self.folder / 'log').read_text()[-600:]}")
            if not self.alive:
                self._spawn()
            time.sleep(POLL_S)

    def _spawn(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        places = {"data-root": "root", "exec-root": "exec", "pidfile": "pid"}
        command = ["dockerd", f"--host={self.host}", "--iptables=false", "--ip6tables=false", "--bridge=none"]
        command += [f"--{option}={self.folder / name}" for option, name in places.items()]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def build_image(self) -> None:
        """Make the sandbox image from this interpreter."""
        command = [sys.executable, "-m", "traced", "sandbox", "image", "--from-host"]
        subprocess.run(command, env={**os.environ, "DOCKER_HOST": self.host}, check=True, capture_output=True)

    def _answers(self) -> bool:
        with (
            contextlib.closing(HTTPConnection("docker", timeout=START_S)) as connection,
            socket.socket(socket.AF_UNIX) as unix_socket,
        ):
            try:  # httpx leaks its socket where nobody listens
                unix_socket.connect(str(self.folder / "docker.sock"))
                connection.sock = unix_socket
                connection.request("GET", "/_ping")
                return connection.getresponse().status == HTTPStatus.OK
            except (OSError, HTTPException):
                return False

    def kill(self) -> None:
        """Kill the engine with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def end(self) -> None:
        """Stop the engine and its leftover processes, and remove its folder."""
        if self.alive and self.process is not None:
            self.process.terminate()
            self.process.wait(START_S)
        for process in self._of_folder():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for mounted in reversed(_mounts(self.folder)):
            subprocess.run(["umount", "-l", mounted], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _of_folder(self) -> list[psutil.Process]:
        """containerd and its shims outlive an engine that was killed; their arguments name the folder."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name().startswith("containerd") and str(self.folder) in " ".join(process.cmdline()):
                    processes.append(process)
        return processes


def _mounts(folder: Path) -> list[str]:
    places = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted(place for place in places if place.startswith(f"{folder}/"))
