"""Installing the unit with systemd, and taking it out again.

Invariants: a unit file that ``install`` did not write is neither replaced nor removed; the file is written beside its
name and renamed; installing twice changes nothing. Data are never touched.
Fails: ``NoServiceManager``, ``UnitRefused``, ``SystemctlFailed`` (with what systemctl said).
"""

import grp
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from traced.host.errors import NoServiceManager, SystemctlFailed, UnitRefused
from traced.host.unit import MARK, Machine, Unit, render

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
SYSTEM_UNITS = Path("/etc/systemd/system")
DOCKER_SOCKET = Path("/run/docker.sock")
GPU = Path("/dev/nvidiactl")
SYSTEMCTL_S = 120


@dataclass(frozen=True)
class Installed:
    """A unit on this machine: its file, whether it is ours and up to date, and what systemd says of it."""

    path: Path
    there: bool
    ours: bool
    current: bool  # as ``install`` would write it now
    state: str  # "" where systemd does not run


def unit_path(unit: Unit) -> Path:
    """Where the unit's file belongs: systemd.unit(5), the administrator's directory or the user's own."""
    if unit.system:
        return SYSTEM_UNITS / f"{unit.name}.service"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "systemd" / "user" / f"{unit.name}.service"


def look(unit: Unit) -> Installed:
    """How the unit stands."""
    path = unit_path(unit)
    text = _text(path)
    state = ""
    if BOOTED.is_dir() and shutil.which("systemctl"):
        state = _call(unit, "is-active", path.name).stdout.strip()
    return Installed(path, path.exists(), text.startswith(MARK), text == render(unit), state)


def install(unit: Unit) -> Path:
    """Write the unit and have systemd start it at boot; returns its path. Starting it now is left to the person."""
    text, path = render(unit), unit_path(unit)
    _require_systemd()
    _require_reach(unit)
    if path.exists() and not _text(path).startswith(MARK):
        raise UnitRefused(f"{path} was not written by traced", hint=f"move it away, or --name {unit.name}2")
    _write(path, text)
    _systemctl(unit, "daemon-reload")
    _systemctl(unit, "enable", path.name)
    return path


def uninstall(unit: Unit) -> Path:
    """Stop the unit, take it out of the start-up and remove its file; returns the path that was."""
    path = unit_path(unit)
    if not path.exists():
        raise UnitRefused(f"there is no {path}", hint="traced service show")
    if not _text(path).startswith(MARK):
        raise UnitRefused(f"{path} was not written by traced", hint=f"systemctl disable --now {path.name}")
    _require_systemd()
    _systemctl(unit, "disable", "--now", path.name)
    try:
        path.unlink()
    except OSError as error:
        raise UnitRefused(f"{path} cannot be removed: {error.strerror}", hint="try it as root, or --user") from error
    _systemctl(unit, "daemon-reload")
    return path


def machine() -> Machine:
    """What of this machine a unit depends on."""
    version = 0
    if systemctl := shutil.which("systemctl"):
        said = subprocess.run([systemctl, "--version"], capture_output=True, text=True, check=False).stdout
        version = int(found[1]) if (found := re.match(r"systemd (\d+)", said)) else 0
    return Machine(version, _socket_group(), GPU.exists())


def _socket_group() -> str:
    """The group of the Docker socket; "" where there is no socket, or only root's group has it."""
    try:
        number = DOCKER_SOCKET.stat().st_gid
        return grp.getgrgid(number).gr_name if number else ""
    except (OSError, KeyError):
        return ""


def _require_systemd() -> None:
    if not BOOTED.is_dir() or not shutil.which("systemctl"):
        raise NoServiceManager(
            "systemd does not run on this machine, so there is nothing to install a unit into",
            hint="docker compose up -d (compose.yaml), or `traced up` under the supervisor that is there",
        )


def _require_reach(unit: Unit) -> None:
    """A made-up user must be able to start this interpreter and to read this package."""
    if not unit.system or unit.run_as:
        return
    for needed in (unit.python, unit.python.resolve(), Path(__file__).resolve()):
        closed = next((place for place in needed.parents if not place.stat().st_mode & 0o001), None)
        if closed is not None:
            raise UnitRefused(
                f"{needed} lies in {closed}, which other users cannot enter",
                hint="--run-as USER, or install below /opt",
            )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        raise UnitRefused(f"{path} cannot be written: {error.strerror}", hint="try it as root, or --user") from error


def _systemctl(unit: Unit, *words: str) -> None:
    done = _call(unit, *words)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        hint = "systemctl status" if unit.system else "log in as that user (or loginctl enable-linger USER)"
        raise SystemctlFailed(f"systemctl {' '.join(words)}: {said or f'exit status {done.returncode}'}", hint=hint)


def _call(unit: Unit, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["systemctl", *([] if unit.system else ["--user"]), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SYSTEMCTL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemctlFailed(f"{' '.join(command)}: {error}", hint="systemctl status") from error
