"""A PostgreSQL server of one's own for a while: no password, its own folder, a local socket only."""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def missing() -> str:
    """What a server needs and is not there, or ""."""
    if shutil.which("initdb") is None and not BINARIES:
        return "no PostgreSQL server is installed (no initdb); apt-get install postgresql"
    if importlib.util.find_spec("psycopg") is None:
        return "the driver psycopg is not installed; pip install 'traced[postgres]'"
    return ""


@contextmanager
def database(store: str) -> Iterator[str]:
    """The URL of a fresh database on a server that runs as long as the body; "" where ``store`` is not "postgres"."""
    if store != "postgres":
        yield ""
        return
    if lacking := missing():
        raise SystemExit(lacking)
    binaries = BINARIES[-1].parent if BINARIES else Path(str(shutil.which("initdb"))).parent
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path has to be short
    data, log = str(folder / "data"), str(folder / "log")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder}"
    try:
        os.chown(folder, _owner().pw_uid, _owner().pw_gid)
        _run(str(binaries / "initdb"), "-D", data, "-U", "traced", "-A", "trust", "-E", "UTF8", "--no-sync")
        _run(str(binaries / "pg_ctl"), "-D", data, "-l", log, "-w", "-o", options, "start")
        try:
            yield f"postgresql://traced@/postgres?host={folder}"
        finally:
            _run(str(binaries / "pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)


def _owner() -> pwd.struct_passwd:
    """Who runs the server: PostgreSQL refuses root."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    return next(user for user in pwd.getpwall() if user.pw_name in ("postgres", "nobody"))


def _run(*command: str) -> None:
    user = _owner()
    change: dict[str, Any] = {}
    if user.pw_uid != os.geteuid():
        change = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    subprocess.run(command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True, **change)
