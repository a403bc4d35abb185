"""A PostgreSQL server of one's own for a while: no password, its own folder, a local socket only."""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def missing() -> str:
    """The missing requirement of a server, or ""."""
    if shutil.which("initdb") is None and not BINARIES:
        return "no PostgreSQL server is installed (no initdb); apt-get install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "the driver psycopg is not installed; pip install 'traced[postgres]'"
    return ""


@contextmanager
def database(store: str) -> Iterator[str]:
    """Provide the URL of a new database on a temporary server; "" where ``store`` is not "postgres"."""
    if store != "postgres":
        yield ""
        return
    if requirement := missing():
        raise SystemExit(requirement)
    with server() as running:
        yield running.url("postgres")


@dataclass(frozen=True)
class Server:
    """A server in a folder of its own; it can be stopped and started again."""

    folder: Path
    options: str

    def url(self, database: str) -> str:
        """The URL of one of its databases."""
        return f"postgresql://traced@/{database}?host={self.folder}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        # the log goes to a file, so that the server does not hold on to a pipe of this process
        _run("pg_ctl", "-D", f"{self.folder}/data", "-l", f"{self.folder}/log", "-w", "-o", self.options, "start")

    def take_ownership(self) -> None:
        """Give its files to the user that runs it."""
        for path in [self.folder, *self.folder.rglob("*")]:
            os.chown(path, _owner().pw_uid, _owner().pw_gid)

    def stop(self) -> None:
        """End it at once, as a crash would."""
        _run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-m", "immediate", "stop")


@contextmanager
def server(options: str = "", parent: Path = Path("/tmp")) -> Iterator[Server]:
    """Provide a temporary server in a folder of ``parent``, started with ``options`` of ``postgres``."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir=parent))  # a socket's path has to be short
    instance = Server(folder, f"-c listen_addresses='' -c unix_socket_directories={folder} {options}")
    try:
        os.chown(folder, _owner().pw_uid, _owner().pw_gid)
        _run("initdb", "-D", f"{folder}/data", "-U", "traced", "-A", "trust", "-E", "UTF8", "--no-sync")
        instance.start()
        try:
            yield instance
        finally:
            with suppress(subprocess.CalledProcessError):  # it was stopped before
                instance.stop()
    finally:
        shutil.rmtree(folder)


def _owner() -> pwd.struct_passwd:
    """The user that runs the server: PostgreSQL refuses root."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    return next(user for user in pwd.getpwall() if user.pw_name in ("postgres", "nobody"))


def _run(program: str, *arguments: str) -> None:
    executable = BINARIES[-1].parent / program if BINARIES else Path(str(shutil.which(program)))
    user = _owner()
    change: dict[str, Any] = {}
    if user.pw_uid != os.geteuid():
        change = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    command = [str(executable), *arguments]
    subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, **change)
