"""The systemd unit that runs the daemon: what it may do, and what it is told.

Invariants: the text depends on nothing but its ``Unit``; words of the command line are quoted as systemd.syntax(7) and
systemd.service(5) have it (``:`` before the program turns ``$`` expansion off, ``%`` is doubled). SIGTERM goes to the
daemon alone (KillMode=mixed), which stops its children in order; a child that the kernel kills for memory does not
take the daemon (OOMPolicy=continue); wrong settings (exit code 2) are not tried again.

A system unit is confined by systemd.exec(5)'s options; memory stays executable, because PyTorch compiles at run time,
and other processes stay visible, because orphans are looked for. A user's unit has no mounts of its own (that needs
user namespaces, which not every kernel grants), so ProtectSystem and the like are left out there.

Fails: ``UnitRefused`` for a path that no unit can hold. Not covered: the right to the Docker socket is as good as root
on the machine, whatever the unit says; point DOCKER_HOST at a rootless engine where that matters.

Installing the unit with systemd, and taking it out again.

Invariants: a unit file that ``install`` did not write is neither replaced nor removed; the file is written beside its
name and renamed; installing twice changes nothing. Data are never touched.
Fails: ``NoServiceManager``, ``UnitRefused``, ``SystemctlFailed`` (with what systemctl said).
"""

import grp
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from traced.core.errors import NoServiceManager, SystemctlFailed, UnitRefused

MARK = "# Written by `traced service install`; `traced service uninstall` removes it. Change it with `systemctl edit`."
STATE_ROOT = Path("/var/lib")
NOTIFY_RELOAD = 253  # the first systemd that knows Type=notify-reload
STOP_MARGIN_S = 30

_ANYWHERE = (
    "NoNewPrivileges=yes",
    "LockPersonality=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "RestrictNamespaces=yes",
    "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)

_SYSTEM = (
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "ProtectClock=yes",
    "ProtectHostname=yes",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
)


@dataclass(frozen=True)
class Machine:
    """What of this machine the unit depends on."""

    systemd: int = 0  # version; 0: not known, taken for a new one
    docker_group: str = ""  # that may open the Docker socket
    gpu: bool = False


@dataclass(frozen=True)
class Unit:
    """Everything that the text is made from; ``run_as`` "" means a user that systemd makes up (system units only)."""

    python: Path
    data_dir: Path
    name: str = "traced"
    system: bool = False
    run_as: str = ""
    memory_max: str = ""  # "" is no limit; else as systemd.resource-control(5) has it, e.g. "24G"
    drain_s: float = 120.0
    watchdog_s: int = 60
    machine: Machine = field(default_factory=Machine)


def render(unit: Unit) -> str:
    """The unit file; raises ``UnitRefused``."""
    _check(unit)
    program = [str(unit.python), "-P", "-m", "traced", "up", "--data-dir", str(unit.data_dir)]
    after = "network-online.target docker.service" if unit.system else "network.target"
    lines = [
        MARK,
        "[Unit]",
        f"Description=traced, a daemon that trains an agent's missing capabilities ({unit.name})",
        f"After={after}",
        *(["Wants=network-online.target"] if unit.system else []),
        "StartLimitIntervalSec=0",  # a database that is away for an hour is waited for, by starting again and again
        "",
        "[Service]",
        *_kind(unit),
        f"ExecStart=:{' '.join(quoted(word) for word in program)}",
        "Restart=on-failure",
        "RestartSec=5",
        "RestartPreventExitStatus=2",
        f"WatchdogSec={unit.watchdog_s}",
        "TimeoutStartSec=300",
        f"TimeoutStopSec={int(unit.drain_s) + STOP_MARGIN_S}",
        "KillMode=mixed",
        "OOMPolicy=continue",
        *([f"MemoryMax={unit.memory_max}"] if unit.memory_max else []),
        *_ANYWHERE,
        *(_confinement(unit) if unit.system else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.system else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """``word`` as one word of a unit's setting that is split at blanks (not for ``$``, see above)."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _check(unit: Unit) -> None:
    for path in (unit.python, unit.data_dir):
        if not path.is_absolute() or any(ord(letter) < 32 or letter in '"\\\x7f' for letter in str(path)):
            raise UnitRefused(  # some settings of paths know no escapes: systemd 252 refuses these there
                f"{str(path)!r} cannot stand in a unit",
                hint="use an absolute path without quotation marks, backslashes and control characters",
            )
    if not re.fullmatch(r"[A-Za-z0-9_.@-]{1,200}", unit.name):
        raise UnitRefused(f"{unit.name!r} is no name for a unit", hint="traced service install --name traced")
    if unit.memory_max and not re.fullmatch(r"\d+(\.\d+)?[KMGT%]?|infinity", unit.memory_max):
        raise UnitRefused(f"{unit.memory_max!r} is no amount of memory", hint="--memory-max 24G")
    if unit.run_as and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*\$?", unit.run_as):
        raise UnitRefused(f"{unit.run_as!r} is no user's name", hint="--run-as USER")
    if unit.system and not unit.run_as and unit.data_dir.parent != STATE_ROOT:
        raise UnitRefused(
            f"a user that systemd makes up can keep data below {STATE_ROOT} only, not in {unit.data_dir}",
            hint=f"--data-dir {STATE_ROOT / unit.name}, or --run-as USER",
        )


def _kind(unit: Unit) -> list[str]:
    if unit.machine.systemd and unit.machine.systemd < NOTIFY_RELOAD:
        return ["Type=notify", "NotifyAccess=main", "ExecReload=/bin/kill -HUP $MAINPID"]
    return ["Type=notify-reload", "NotifyAccess=main"]


def _confinement(unit: Unit) -> list[str]:
    group = unit.machine.docker_group
    return [
        *_SYSTEM,
        *_home(unit),
        *_identity(unit),
        *([f"SupplementaryGroups={group}"] if group else []),
        *(["DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"] if unit.machine.gpu else ["PrivateDevices=yes"]),
    ]


def _home(unit: Unit) -> list[str]:
    """Homes are hidden, unless the program or its data live in one: then they can be read."""
    homes = (Path("/home"), Path("/root"), Path("/run/user"))
    places = (unit.python, unit.python.resolve(), unit.data_dir, Path(__file__))
    inside = any(place.is_relative_to(home) for place in places for home in homes)
    return ["ProtectHome=read-only" if inside else "ProtectHome=yes"]


def _identity(unit: Unit) -> list[str]:
    cache = f"Environment={quoted(f'XDG_CACHE_HOME={unit.data_dir}/cache')}"
    if not unit.run_as:
        return ["DynamicUser=yes", cache, *_state_directory(unit)]
    if unit.data_dir.parent == STATE_ROOT:
        return [f"User={unit.run_as}", *_state_directory(unit)]
    return [f"User={unit.run_as}", f"ReadWritePaths={quoted(str(unit.data_dir))}"]


def _state_directory(unit: Unit) -> list[str]:
    return [f"StateDirectory={quoted(unit.data_dir.name)}", "StateDirectoryMode=0700"]


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
