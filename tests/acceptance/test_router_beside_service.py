"""``traced up`` with the router beside it: started, started again when it is killed, ended with the service."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.unit.maintenance.place import loose_entries
from tests.waiting import eventually


def test_the_router_comes_back_and_ends_with_the_service(tmp_path: Path) -> None:
    folder, log = tmp_path / "data", tmp_path / "data" / "logs" / "router.log"
    pairs = ["serving.with_service=true", "serving.port=0"]
    folder.mkdir(mode=0o755)
    (folder / "of an earlier version").touch(0o644)
    command = [sys.executable, "-m", "traced", "up", "--data-dir", str(folder)]
    command += [part for pair in pairs for part in ("--set", pair)]
    with (tmp_path / "out").open("wb") as out:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        service = subprocess.Popen(command, stdout=out, stderr=out, env=environment, umask=0)
    try:
        first = eventually(lambda: served_urls(log), within_s=90)
        assert "base" in [entry["id"] for entry in ask(f"{first[-1]}/models")["data"]]
        (router,) = [
            process for process in psutil.Process(service.pid).children() if "traced.gateway" in process.cmdline()
        ]
        router.kill()
        restarted = eventually(lambda: [url for url in served_urls(log) if url not in first], within_s=90)
        assert ask(f"{restarted[-1]}/models")["object"] == "list"
        assert loose_entries(folder) == []
        assert "closed 1 files and 1 folders" in (tmp_path / "out").read_text()
        family = psutil.Process(service.pid).children(recursive=True)
        service.send_signal(signal.SIGTERM)
        assert service.wait(90) == 0
        assert [
            process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ] == []
    finally:
        service.kill()
        service.wait()


def served_urls(log: Path) -> list[str]:
    """The addresses of all routers in the log."""
    return re.findall(r"serving at (\S+/v1)", log.read_text()) if log.exists() else []


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.URLError as error:
        raise AssertionError(url) from error
