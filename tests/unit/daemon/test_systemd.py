"""The content of the systemd unit, and that only the unit of traced is written or removed."""

import re
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traced.core.errors import NoServiceManager, SystemctlFailed, UnitRefused
from traced.daemon import systemd as service
from traced.daemon.systemd import MARK, Machine, Unit, install, look, quoted, render, uninstall, unit_path

PYTHON = Path("/opt/traced/bin/python")


def unit(**values: object) -> Unit:
    return Unit(**{"python": PYTHON, "data_dir": Path("/var/lib/traced"), "system": True, **values})  # type: ignore[arg-type]


def settings(text: str) -> dict[str, list[str]]:
    table: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            table.setdefault(key, []).append(value)
    return table


def words(value: str) -> list[str]:
    """Parse the quoted words of a setting as in systemd.syntax(7): backslash escapes, then specifiers."""
    quoted_words = re.findall(r'"((?:\\.|[^"\\])*)"', value)
    return [re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in quoted_words]


printable = st.text(st.characters(min_codepoint=32, blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@given(st.lists(printable, min_size=1, max_size=4))
def test_any_word_comes_back_as_it_was(given_words: list[str]) -> None:
    line = " ".join(quoted(word) for word in given_words)
    assert words(line) == given_words
    assert not re.search(r"(?<!%)(%%)*%(?!%)", line)


def test_a_system_unit_confines_and_supervises() -> None:
    text = render(unit(memory_max="24G", drain_s=100.0, watchdog_s=30, machine=Machine(255, "docker", False)))
    table = settings(text)
    assert text.startswith(MARK)
    assert words(table["ExecStart"][0]) == [str(PYTHON), "-P", "-m", "traced", "up", "--data-dir", "/var/lib/traced"]
    expected = {
        "Type": "notify-reload",
        "WatchdogSec": "30",
        "TimeoutStopSec": "130",
        "StartLimitIntervalSec": "0",
        "KillMode": "mixed",
        "OOMPolicy": "continue",
        "Restart": "on-failure",
        "MemoryMax": "24G",
        "NoNewPrivileges": "yes",
        "ProtectSystem": "strict",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "DynamicUser": "yes",
        "StateDirectory": '"traced"',
        "SupplementaryGroups": "docker",
        "CapabilityBoundingSet": "",
        "WantedBy": "multi-user.target",
    }
    assert {key: table[key] for key in expected} == {key: [value] for key, value in expected.items()}


def test_it_follows_the_machine_the_user_and_the_place() -> None:
    old = settings(render(unit(machine=Machine(252, "", True))))
    assert (old["Type"], old["ExecReload"]) == (["notify"], ["/bin/kill -HUP $MAINPID"])
    assert old["DeviceAllow"] == ["char-nvidia* rw"]
    assert "PrivateDevices" not in old
    assert "SupplementaryGroups" not in old
    named_user = settings(render(unit(run_as="ann", data_dir=Path("/srv/a b%c"))))
    assert (named_user["User"], words(named_user["ReadWritePaths"][0])) == (["ann"], ["/srv/a b%c"])
    assert "DynamicUser" not in named_user
    assert settings(render(unit()))["ProtectHome"] == [
        "read-only" if Path(service.__file__).is_relative_to("/root") else "yes"
    ]
    assert settings(render(unit(run_as="ann", data_dir=Path("/home/ann/x"))))["ProtectHome"] == ["read-only"]
    user_unit = settings(render(unit(system=False)))
    assert user_unit["WantedBy"] == ["default.target"]
    assert user_unit["NoNewPrivileges"] == ["yes"]
    assert not {"ProtectSystem", "DynamicUser", "PrivateTmp", "User"} & set(user_unit)


@pytest.mark.parametrize(
    "values",
    [
        {"data_dir": Path("relative")},
        {"data_dir": Path("/var/lib/a\nExecStartPre=/bin/evil")},
        {"data_dir": Path("/srv/data")},
        {"data_dir": Path('/var/lib/a"b')},
        {"python": Path("/opt/a\\b/python")},
        {"name": "../evil"},
        {"memory_max": "lots"},
        {"memory_max": "1G\nUser=root"},
        {"run_as": "a b"},
    ],
)
def test_what_no_unit_can_hold_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(UnitRefused) as raised:
        render(unit(**values))
    assert raised.value.hint


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake systemctl and return the file in which it logs its arguments."""
    call_log = tmp_path / "asked"
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {call_log}\n[ "$REFUSE" ] && {{ echo "no such thing" >&2; exit 4; }}\necho active\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(service, "BOOTED", tmp_path)
    return call_log


def test_install_look_and_uninstall(systemd: Path, tmp_path: Path) -> None:
    mine = unit(system=False, data_dir=tmp_path)
    assert not look(mine).there
    path = install(mine)
    assert path == tmp_path / "config/systemd/user/traced.service" == unit_path(mine)
    assert path.read_text() == render(mine)
    assert [entry.name for entry in path.parent.iterdir()] == ["traced.service"]
    status = look(mine)
    assert (status.there, status.ours, status.current, status.state) == (True, True, True, "active")
    changed = unit(system=False, data_dir=tmp_path, memory_max="1G")
    assert look(changed).current is False
    install(changed)
    assert look(changed).current is True
    uninstall(mine)
    assert not path.exists()
    commands = [line for line in systemd.read_text().splitlines() if "is-active" not in line]
    start = ["--user daemon-reload", "--user enable traced.service"]
    assert commands == [*start, *start, "--user disable --now traced.service", "--user daemon-reload"]
    with pytest.raises(UnitRefused, match="no unit is installed"):
        uninstall(mine)


def test_a_unit_that_someone_else_wrote_is_left_alone(systemd: Path, tmp_path: Path) -> None:
    mine = unit(system=False, data_dir=tmp_path)
    path = unit_path(mine)
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=/bin/true\n")
    for attempt in (install, uninstall):
        with pytest.raises(UnitRefused, match="was not written by traced"):
            attempt(mine)
    assert "/bin/true" in path.read_text()
    assert not systemd.exists()
    assert (look(mine).there, look(mine).ours) == (True, False)


def test_what_systemctl_says_is_passed_on(systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSE", "yes")
    with pytest.raises(SystemctlFailed, match="daemon-reload: no such thing"):
        install(unit(system=False, data_dir=tmp_path))


def test_without_systemd_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BOOTED", tmp_path / "no")
    with pytest.raises(NoServiceManager) as raised:
        install(unit(system=False))
    assert "compose" in raised.value.hint


def test_a_made_up_user_must_reach_the_interpreter(
    systemd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SYSTEM_UNITS", tmp_path / "etc")
    closed = tmp_path / "closed"
    (closed / "bin").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(UnitRefused, match="the user of the unit cannot access") as raised:
        install(unit(python=closed / "bin" / "python"))
    assert "--run-as" in raised.value.hint
    install(unit(python=closed / "bin" / "python", run_as="ann"))
    assert (tmp_path / "etc/traced.service").exists()
