"""Ways out of the container: the network, secrets, privileges, and files or state that others would meet."""

import asyncio
import errno
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.client import SandboxSource
from sandbox.docker_engine import connect, weaknesses
from sandbox.errors import EnvironmentFault
from sandbox.image import Image
from tests.integration.owner import owner
from tests.integration.sandbox.hostile import LIMITS, Hostile, hostile

pytestmark = pytest.mark.docker
SECRET = "sk-a-secret-of-the-host"
ALLOWED = {"PATH", "HOSTNAME", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED"}
KINDS = {"overlay", "proc", "tmpfs", "devpts", "sysfs", "cgroup", "cgroup2", "mqueue"}
PLACES = {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/sbin/docker-init"}  # the engine's own, read-only
native = pytest.mark.docker if platform.machine() == "x86_64" else pytest.mark.optional
NUMBERS = {"ptrace": 101, "mount": 165, "unshare": 272, "keyctl": 250, "bpf": 321, "setuid": 105, "kexec_load": 246}
NUMBERS |= {"mq_open": 240}
NEW_USER, NEW_MOUNTS, NEW_PROCESSES = 0x10000000, 0x00020000, 0x20000000


@pytest.fixture(scope="module")
def attacker(image: Image) -> Iterator[Hostile]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPENAI_API_KEY", SECRET)
        patched.setenv("TRACED_STORE__URL", f"postgresql://x:{SECRET}@localhost/x")
        with hostile("escapes") as started:
            yield started


def system_call(attacker: Hostile, name: str, *arguments: object) -> int:
    if platform.machine() != "x86_64":
        pytest.skip("the program is written for x86_64")
    result: int = attacker.attack("system_call", NUMBERS[name], arguments).reply
    return result


def test_a_name_is_not_looked_up(attacker: Hostile) -> None:
    assert attacker.attack("look_up_a_name").reply == "gaierror"


def test_an_address_of_ipv4_is_not_reached(attacker: Hostile) -> None:
    assert attacker.attack("connect_to", "AF_INET", ["192.0.2.1", 80]).reply == "OSError"
    assert attacker.attack("connect_to", "AF_INET", ["172.17.0.1", 22]).reply == "OSError"  # the engine's usual bridge


def test_an_address_of_ipv6_is_not_reached(attacker: Hostile) -> None:
    for address in (["2001:db8::1", 80], ["fe80::1", 80]):
        assert attacker.attack("connect_to", "AF_INET6", address).reply == "OSError"


@pytest.mark.parametrize("family", ["AF_INET", *(["AF_INET6"] if Path("/proc/net/if_inet6").exists() else [])])
def test_the_hosts_loopback_is_not_reached(attacker: Hostile, family: str) -> None:
    address = "127.0.0.1" if family == "AF_INET" else "::1"
    with socket.socket(getattr(socket, family)) as listening:
        listening.bind((address, 0))
        listening.listen()
        listening.setblocking(False)
        port = listening.getsockname()[1]
        assert attacker.attack("connect_to", family, [address, port]).reply in {"ConnectionRefusedError", "OSError"}
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_the_link_local_metadata_service_is_not_reached(attacker: Hostile) -> None:
    for address in (["169.254.169.254", 80], ["169.254.170.2", 80]):
        assert attacker.attack("connect_to", "AF_INET", address).reply == "OSError"


def test_raw_sockets_are_refused(attacker: Hostile) -> None:
    assert set(attacker.attack("raw_sockets").reply) <= {"PermissionError", "OSError"}


def test_a_vsock_is_refused_or_the_engine_is_reported_as_too_old(attacker: Hostile) -> None:
    """An address family without a namespace: no network is no protection. Nobody is connected to here."""
    result = attacker.attack("vsock").reply
    client = connect()
    try:
        weak = weaknesses(client)
    finally:
        client.close()
    if weak:
        assert result in {"None", "OSError"}  # made, or unknown to the kernel
    else:
        assert result in {"PermissionError", "OSError"}


def test_an_abstract_socket_of_the_host_is_not_reached(attacker: Hostile) -> None:
    name = f"\0traced-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        assert attacker.attack("connect_to", "AF_UNIX", name).reply == "ConnectionRefusedError"


def test_there_is_no_interface_but_loopback(attacker: Hostile) -> None:
    assert set(attacker.attack("interfaces").reply) <= {"lo", "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0", "erspan0"}


def test_environment_variables_hold_no_secret(attacker: Hostile) -> None:
    variables = attacker.attack("variables").reply
    assert set(variables) <= ALLOWED
    assert SECRET not in str(variables)


def test_proc_holds_no_secret_and_no_process_of_the_host(attacker: Hostile) -> None:
    report = attacker.attack("everything_proc_tells").reply
    assert report["pids"][0] == 1
    assert len(report["pids"]) == 2  # the init and the worker
    assert "sandbox.worker" in report["text"]
    for secret in (SECRET, "OPENAI_API_KEY", "pytest", "tests/integration"):
        assert secret not in report["text"]


def test_mountinfo_shows_no_folder_of_the_host(attacker: Hostile) -> None:
    for root, place, kind in attacker.attack("mounts").reply:
        assert kind in KINDS or place in PLACES, (root, place, kind)


def test_the_engines_files_hold_nothing_of_the_hosts_network(attacker: Hostile) -> None:
    files = attacker.attack("files_of_the_engine").reply
    assert files["/etc/hostname"] == "sandbox\n"
    assert {line.split()[0] for line in files["/etc/resolv.conf"].splitlines()} <= {"nameserver", "options", "#"}
    assert [line for line in files["/etc/resolv.conf"].splitlines() if "nameserver" in line] == ["nameserver 127.0.0.1"]
    assert socket.gethostname() not in files["/etc/hosts"].split()


def test_there_is_no_engines_socket(attacker: Hostile) -> None:
    assert attacker.attack("engine_sockets").reply == []


@native
def test_a_program_from_memory_can_be_run_and_does_work(attacker: Hostile) -> None:
    """Else the refusals below would say nothing: no setuid to one's own user is refused, none to root's is granted."""
    assert system_call(attacker, "setuid", 65534) == 0


@native
@pytest.mark.parametrize("flags", [NEW_USER, NEW_MOUNTS, NEW_PROCESSES, NEW_USER | NEW_MOUNTS])
def test_unshare_is_refused(attacker: Hostile, flags: int) -> None:
    assert system_call(attacker, "unshare", flags) == errno.EPERM


@native
def test_mount_is_refused(attacker: Hostile) -> None:
    assert system_call(attacker, "mount", "none", "/tmp", "tmpfs", 0, 0) == errno.EPERM


@native
def test_ptrace_reaches_no_process_of_the_host(attacker: Hostile) -> None:
    attach, host = 16, os.getpid()
    assert system_call(attacker, "ptrace", attach, host) in {errno.ESRCH, errno.EPERM}


@native
def test_no_message_queue_is_made(attacker: Hostile) -> None:
    create, all_default = os.O_CREAT | os.O_RDWR, 0
    assert system_call(attacker, "mq_open", "queue", create, 0o600, all_default) == errno.EMFILE


@native
def test_keyctl_is_refused(attacker: Hostile) -> None:
    assert system_call(attacker, "keyctl", 0, 2**32 - 3, 1) == errno.EPERM  # the session's keyring


@native
def test_bpf_is_refused(attacker: Hostile) -> None:
    assert system_call(attacker, "bpf", 0, "\x02\0\0\0\x04\0\0\0\x04\0\0\0\x01\0\0\0", 16) == errno.EPERM


@native
def test_another_kernel_is_refused(attacker: Hostile) -> None:
    assert system_call(attacker, "kexec_load", 0, 0, 0, 0) == errno.EPERM


def test_setuid_is_refused(attacker: Hostile) -> None:
    assert set(attacker.attack("become_root").reply) == {"PermissionError"}
    assert attacker.attack("setuid_programs").reply == []


@native
def test_setuid_is_refused_to_a_program_of_its_own(attacker: Hostile) -> None:
    assert system_call(attacker, "setuid", 0) == errno.EPERM


def test_the_root_file_system_is_not_written(attacker: Hostile) -> None:
    assert attacker.attack("writable_folders", fresh=True).reply == ["/tmp"]
    assert set(attacker.attack("writable_kernel_files").reply) <= {"PermissionError", "OSError", "FileNotFoundError"}
    assert set(attacker.attack("poison_the_image").reply) == {"OSError"}


def test_nothing_is_executed_from_tmpfs(attacker: Hostile) -> None:
    assert attacker.attack("run_from_tmp", fresh=True).reply == "PermissionError"


def test_terminal_escapes_reach_no_screen(attacker: Hostile) -> None:
    error = attacker.attack("speak_to_the_terminal").error
    assert isinstance(error, EnvironmentFault)
    words = r"\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
    assert error.error == rf"ValueError: {words}\udcff"
    assert {sign for sign in error.traceback if not sign.isprintable()} == {"\n"}
    assert attacker.run(attacker.source.effects())["printed_head"] == words + "\n"
    attacker.attack("nothing", fresh=True)


def test_sitecustomize_conftest_and_import_paths_poison_nobody(attacker: Hostile) -> None:
    path = attacker.attack("import_path").reply
    assert not {"", ".", "/tmp"} & set(path)
    out, errors = attacker.attack("poison", fresh=True).reply
    assert (out, errors) == ("/app/sandbox/worker.py\n", "")
    assert attacker.attack("import_path").reply == path


async def test_no_state_leaks_between_two_episodes(attacker: Hostile, lamp_shop: str) -> None:
    """An environment that keeps no global keeps nothing: what one episode did shows in no other of its container."""
    async with SandboxSource(lamp_shop) as source:
        play = await source.oracle(3)
        episode, other = source.episode(), source.episode()
        first = await episode.reset(3)
        for turn in play.turns:
            await episode.step(turn.message)
        assert (await episode.score()).success
        assert await other.reset(3) == first
        assert not (await other.score()).success
        assert [(await other.step(turn.message)).messages for turn in play.turns] == [
            turn.replies for turn in play.turns
        ]


def test_no_state_leaks_between_two_runs(attacker: Hostile) -> None:
    """What a container's globals, variables and files hold ends with it."""
    assert attacker.attack("leave_a_mark").reply == ["mark", "mark", "MARK"]
    assert attacker.attack("look_for_marks", fresh=True).reply == ["mark", "mark", "MARK"]
    assert attacker.attack("look_for_marks").reply == []


def test_no_state_leaks_between_two_containers(attacker: Hostile) -> None:
    async def main() -> Any:
        async with SandboxSource(attacker.source.source_code, limits=LIMITS, owner=owner("escapes")) as source:
            mine = Hostile(asyncio.Runner(), source)
            return await mine.execute(await mine.new_episode(), "look_for_marks")

    assert attacker.attack("leave_a_mark").reply == ["mark", "mark", "MARK"]
    assert attacker.run(main()) == []
    attacker.attack("nothing", fresh=True)
