"""Render, install, inspect and remove the systemd unit of the daemon.

Invariants: the text depends only on ``Unit``; a unit file that ``install`` did not write is neither replaced nor
removed; installing twice changes nothing; the data directory is never changed. System units are confined by
systemd.exec(5) options.
How it fails: ``UnitRefused``, ``NoServiceManager``, ``SystemctlFailed`` (with systemctl's output).
Not covered: access to the Docker socket equals root on the machine; use a rootless engine where that matters.
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
NOTIFY_RELOAD = 253  # first systemd version with Type=notify-reload
STOP_MARGIN_S = 30

_COMMON_OPTIONS = (
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

# For system units only: these options need mount namespaces, which not every kernel grants to users. No
# MemoryDenyWriteExecute: PyTorch compiles at run time. No ProtectProc: the sweep looks for orphaned processes.
_SYSTEM_OPTIONS = (
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
    """Facts of the machine that the unit depends on."""

    systemd: int = 0  # version; 0 means unknown and is treated as new
    docker_group: str = ""  # group that may open the Docker socket
    gpu: bool = False


@dataclass(frozen=True)
class Unit:
    """Parameters of the unit; ``run_as`` "" means a dynamic user (system units only)."""

    python: Path
    data_dir: Path
    name: str = "traced"
    system: bool = False
    run_as: str = ""
    memory_max: str = ""  # "" is no limit; else a value of MemoryMax in systemd.resource-control(5), e.g. "24G"
    drain_s: float = 120.0
    watchdog_s: int = 60
    machine: Machine = field(default_factory=Machine)


def render(unit: Unit) -> str:
    """Return the text of the unit file; raises ``UnitRefused`` for an invalid parameter."""
    _validate(unit)
    program = [str(unit.python), "-P", "-m", "traced", "up", "--data-dir", str(unit.data_dir)]
    units_before = "network-online.target docker.service" if unit.system else "network.target"
    lines = [
        MARK,
        "[Unit]",
        f"Description=traced, a daemon that trains an agent's missing capabilities ({unit.name})",
        f"After={units_before}",
        *(["Wants=network-online.target"] if unit.system else []),
        # No limit on restarts: the database may be unreachable for an hour.
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        *_service_type(unit),
        # ":" disables the expansion of "$".
        f"ExecStart=:{' '.join(quoted(word) for word in program)}",
        "Restart=on-failure",
        "RestartSec=5",
        # Exit status 2 means invalid settings, which a restart does not correct.
        "RestartPreventExitStatus=2",
        f"WatchdogSec={unit.watchdog_s}",
        "TimeoutStartSec=300",
        f"TimeoutStopSec={int(unit.drain_s) + STOP_MARGIN_S}",
        # SIGTERM goes to the daemon alone, which stops its children in order.
        "KillMode=mixed",
        # The kernel may kill a child for memory; the daemon must survive that.
        "OOMPolicy=continue",
        *([f"MemoryMax={unit.memory_max}"] if unit.memory_max else []),
        *_COMMON_OPTIONS,
        *(_confinement(unit) if unit.system else []),
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if unit.system else 'default.target'}",
    ]
    return "\n".join(lines) + "\n"


def quoted(word: str) -> str:
    """Quote ``word`` for a unit setting as in systemd.syntax(7); ``$`` is not escaped."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _validate(unit: Unit) -> None:
    for path in (unit.python, unit.data_dir):
        if not path.is_absolute() or any(ord(letter) < 32 or letter in '"\\\x7f' for letter in str(path)):
            # Some path settings know no escapes: systemd 252 refuses these characters there.
            raise UnitRefused(
                f"{str(path)!r} cannot be used in a unit file",
                hint="use an absolute path without quotation marks, backslashes or control characters",
            )
    if not re.fullmatch(r"[A-Za-z0-9_.@-]{1,200}", unit.name):
        raise UnitRefused(f"{unit.name!r} is not a valid name of a unit", hint="traced service install --name traced")
    if unit.memory_max and not re.fullmatch(r"\d+(\.\d+)?[KMGT%]?|infinity", unit.memory_max):
        raise UnitRefused(f"{unit.memory_max!r} is not an amount of memory", hint="--memory-max 24G")
    if unit.run_as and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*\$?", unit.run_as):
        raise UnitRefused(f"{unit.run_as!r} is not a valid user name", hint="--run-as USER")
    if unit.system and not unit.run_as and unit.data_dir.parent != STATE_ROOT:
        raise UnitRefused(
            f"a dynamic user of systemd can only write below {STATE_ROOT}, not in {unit.data_dir}",
            hint=f"--data-dir {STATE_ROOT / unit.name}, or --run-as USER",
        )


def _service_type(unit: Unit) -> list[str]:
    if unit.machine.systemd and unit.machine.systemd < NOTIFY_RELOAD:
        return ["Type=notify", "NotifyAccess=main", "ExecReload=/bin/kill -HUP $MAINPID"]
    return ["Type=notify-reload", "NotifyAccess=main"]


def _confinement(unit: Unit) -> list[str]:
    group = unit.machine.docker_group
    return [
        *_SYSTEM_OPTIONS,
        *_home_protection(unit),
        *_user_options(unit),
        *([f"SupplementaryGroups={group}"] if group else []),
        *(["DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"] if unit.machine.gpu else ["PrivateDevices=yes"]),
    ]


def _home_protection(unit: Unit) -> list[str]:
    """Hide home directories, or make them read-only if the program or its data lie in one."""
    homes = (Path("/home"), Path("/root"), Path("/run/user"))
    paths = (unit.python, unit.python.resolve(), unit.data_dir, Path(__file__))
    inside = any(path.is_relative_to(home) for path in paths for home in homes)
    return ["ProtectHome=read-only" if inside else "ProtectHome=yes"]


def _user_options(unit: Unit) -> list[str]:
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
    """State of a unit on this machine: whether its file exists (``there``) and was written by traced (``ours``)."""

    path: Path
    there: bool
    ours: bool
    current: bool  # whether the file equals what ``install`` would write now
    state: str  # as ``systemctl is-active`` prints it; "" if systemd does not run


def unit_path(unit: Unit) -> Path:
    """Return the path of the unit file, in the administrator's or the user's directory of systemd.unit(5)."""
    if unit.system:
        return SYSTEM_UNITS / f"{unit.name}.service"
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return config / "systemd" / "user" / f"{unit.name}.service"


def look(unit: Unit) -> Installed:
    """Inspect the unit on this machine."""
    path = unit_path(unit)
    text = _read_text(path)
    state = ""
    if BOOTED.is_dir() and shutil.which("systemctl"):
        state = _call(unit, "is-active", path.name).stdout.strip()
    return Installed(path, path.exists(), text.startswith(MARK), text == render(unit), state)


def install(unit: Unit) -> Path:
    """Write the unit, enable it at boot without starting it, and return its path."""
    text, path = render(unit), unit_path(unit)
    _require_systemd()
    _require_readable(unit)
    if path.exists() and not _read_text(path).startswith(MARK):
        raise UnitRefused(f"{path} was not written by traced", hint=f"move that file away, or use --name {unit.name}2")
    _write(path, text)
    _systemctl(unit, "daemon-reload")
    _systemctl(unit, "enable", path.name)
    return path


def uninstall(unit: Unit) -> Path:
    """Stop and disable the unit, remove its file, and return the path."""
    path = unit_path(unit)
    if not path.exists():
        raise UnitRefused(f"no unit is installed at {path}", hint="traced service show")
    if not _read_text(path).startswith(MARK):
        raise UnitRefused(f"{path} was not written by traced", hint=f"systemctl disable --now {path.name}")
    _require_systemd()
    _systemctl(unit, "disable", "--now", path.name)
    try:
        path.unlink()
    except OSError as error:
        raise UnitRefused(
            f"{path} cannot be removed: {error.strerror}", hint="run the command as root, or use --user"
        ) from error
    _systemctl(unit, "daemon-reload")
    return path


def machine() -> Machine:
    """Detect systemd's version, the Docker group and a GPU."""
    version = 0
    if systemctl := shutil.which("systemctl"):
        output = subprocess.run([systemctl, "--version"], capture_output=True, text=True, check=False).stdout
        version = int(match[1]) if (match := re.match(r"systemd (\d+)", output)) else 0
    return Machine(version, _socket_group(), GPU.exists())


def _socket_group() -> str:
    """Return the group of the Docker socket; "" if there is no socket or its group is root."""
    try:
        number = DOCKER_SOCKET.stat().st_gid
        return grp.getgrgid(number).gr_name if number else ""
    except (OSError, KeyError):
        return ""


def _require_systemd() -> None:
    if not BOOTED.is_dir() or not shutil.which("systemctl"):
        raise NoServiceManager(
            "systemd does not run on this machine, so no unit can be installed",
            hint="use docker compose up -d (compose.yaml), or run `traced up` under another supervisor",
        )


def _require_readable(unit: Unit) -> None:
    """Check that a dynamic user can reach this interpreter and this package."""
    if not unit.system or unit.run_as:
        return
    for path in (unit.python, unit.python.resolve(), Path(__file__).resolve()):
        blocked = next((place for place in path.parents if not place.stat().st_mode & 0o001), None)
        if blocked is not None:
            raise UnitRefused(
                f"{path} lies in {blocked}, which the user of the unit cannot access",
                hint="use --run-as USER, or install traced below /opt",
            )


def _read_text(path: Path) -> str:
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
        raise UnitRefused(
            f"{path} cannot be written: {error.strerror}", hint="run the command as root, or use --user"
        ) from error


def _systemctl(unit: Unit, *words: str) -> None:
    result = _call(unit, *words)
    if result.returncode:
        output = (result.stderr or result.stdout).strip()
        hint = "systemctl status" if unit.system else "log in as that user, or run loginctl enable-linger USER"
        raise SystemctlFailed(f"systemctl {' '.join(words)}: {output or f'exit status {result.returncode}'}", hint=hint)


def _call(unit: Unit, *words: str) -> "subprocess.CompletedProcess[str]":
    command = ["systemctl", *([] if unit.system else ["--user"]), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=SYSTEMCTL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SystemctlFailed(f"{' '.join(command)}: {error}", hint="systemctl status") from error
