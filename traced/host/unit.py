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
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from traced.host.errors import UnitRefused

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
