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
def there(image: Image) -> Iterator[Hostile]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPENAI_API_KEY", SECRET)
        patched.setenv("TRACED_STORE__URL", f"postgresql://x:{SECRET}@localhost/x")
        with hostile("escapes") as started:
            yield started


def system_call(there: Hostile, name: str, *arguments: object) -> int:
    if platform.machine() != "x86_64":
        pytest.skip("the program is written for x86_64")
    told: int = there.meet("system_call", NUMBERS[name], arguments).told
    return told


def test_a_name_is_not_looked_up(there: Hostile) -> None:
    assert there.meet("look_up_a_name").told == "gaierror"


def test_an_address_of_ipv4_is_not_reached(there: Hostile) -> None:
    assert there.meet("connect_to", "AF_INET", ["192.0.2.1", 80]).told == "OSError"
    assert there.meet("connect_to", "AF_INET", ["172.17.0.1", 22]).told == "OSError"  # the engine's usual bridge


def test_an_address_of_ipv6_is_not_reached(there: Hostile) -> None:
    for address in (["2001:db8::1", 80], ["fe80::1", 80]):
        assert there.meet("connect_to", "AF_INET6", address).told == "OSError"


@pytest.mark.parametrize("family", ["AF_INET", *(["AF_INET6"] if Path("/proc/net/if_inet6").exists() else [])])
def test_the_hosts_loopback_is_not_reached(there: Hostile, family: str) -> None:
    address = "127.0.0.1" if family == "AF_INET" else "::1"
    with socket.socket(getattr(socket, family)) as listening:
        listening.bind((address, 0))
        listening.listen()
        listening.setblocking(False)
        port = listening.getsockname()[1]
        assert there.meet("connect_to", family, [address, port]).told in {"ConnectionRefusedError", "OSError"}
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_the_link_local_metadata_service_is_not_reached(there: Hostile) -> None:
    for address in (["169.254.169.254", 80], ["169.254.170.2", 80]):
        assert there.meet("connect_to", "AF_INET", address).told == "OSError"


def test_raw_sockets_are_refused(there: Hostile) -> None:
    assert set(there.meet("raw_sockets").told) <= {"PermissionError", "OSError"}


def test_a_vsock_is_refused_or_the_engine_is_told_to_be_too_old_for_it(there: Hostile) -> None:
    """An address family without a namespace: no network is no protection. Nobody is connected to here."""
    told = there.meet("vsock").told
    client = connect()
    try:
        weak = weaknesses(client)
    finally:
        client.close()
    if weak:
        assert told in {"None", "OSError"}  # made, or unknown to the kernel
    else:
        assert told in {"PermissionError", "OSError"}


def test_an_abstract_socket_of_the_host_is_not_reached(there: Hostile) -> None:
    name = f"\0traced-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(name)
        listening.listen()
        assert there.meet("connect_to", "AF_UNIX", name).told == "ConnectionRefusedError"


def test_there_is_no_interface_but_loopback(there: Hostile) -> None:
    assert set(there.meet("interfaces").told) <= {"lo", "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0", "erspan0"}


def test_environment_variables_hold_no_secret(there: Hostile) -> None:
    told = there.meet("variables").told
    assert set(told) <= ALLOWED
    assert SECRET not in str(told)


def test_proc_tells_no_secret_and_no_process_of_the_host(there: Hostile) -> None:
    told = there.meet("everything_proc_tells").told
    assert told["pids"][0] == 1
    assert len(told["pids"]) == 2  # the init and the worker
    assert "sandbox.worker" in told["text"]
    for secret in (SECRET, "OPENAI_API_KEY", "pytest", "tests/integration"):
        assert secret not in told["text"]


def test_mountinfo_shows_no_folder_of_the_host(there: Hostile) -> None:
    for root, place, kind in there.meet("mounts").told:
        assert kind in KINDS or place in PLACES, (root, place, kind)


def test_the_engines_own_files_tell_nothing_of_the_hosts_network(there: Hostile) -> None:
    told = there.meet("files_of_the_engine").told
    assert told["/etc/hostname"] == "sandbox\n"
    assert {line.split()[0] for line in told["/etc/resolv.conf"].splitlines()} <= {"nameserver", "options", "#"}
    assert [line for line in told["/etc/resolv.conf"].splitlines() if "nameserver" in line] == ["nameserver 127.0.0.1"]
    assert socket.gethostname() not in told["/etc/hosts"].split()


def test_there_is_no_engines_socket(there: Hostile) -> None:
    assert there.meet("engine_sockets").told == []


@native
def test_a_program_from_memory_can_be_run_and_does_work(there: Hostile) -> None:
    """Else the refusals below would say nothing: no setuid to one's own user is refused, none to root's is granted."""
    assert system_call(there, "setuid", 65534) == 0


@native
@pytest.mark.parametrize("flags", [NEW_USER, NEW_MOUNTS, NEW_PROCESSES, NEW_USER | NEW_MOUNTS])
def test_unshare_is_refused(there: Hostile, flags: int) -> None:
    assert system_call(there, "unshare", flags) == errno.EPERM


@native
def test_mount_is_refused(there: Hostile) -> None:
    assert system_call(there, "mount", "none", "/tmp", "tmpfs", 0, 0) == errno.EPERM


@native
def test_ptrace_reaches_no_process_of_the_host(there: Hostile) -> None:
    attach, host = 16, os.getpid()
    assert system_call(there, "ptrace", attach, host) in {errno.ESRCH, errno.EPERM}


@native
def test_no_message_queue_is_made(there: Hostile) -> None:
    create, all_default = os.O_CREAT | os.O_RDWR, 0
    assert system_call(there, "mq_open", "queue", create, 0o600, all_default) == errno.EMFILE


@native
def test_keyctl_is_refused(there: Hostile) -> None:
    assert system_call(there, "keyctl", 0, 2**32 - 3, 1) == errno.EPERM  # the session's keyring


@native
def test_bpf_is_refused(there: Hostile) -> None:
    assert system_call(there, "bpf", 0, "\x02\0\0\0\x04\0\0\0\x04\0\0\0\x01\0\0\0", 16) == errno.EPERM


@native
def test_another_kernel_is_refused(there: Hostile) -> None:
    assert system_call(there, "kexec_load", 0, 0, 0, 0) == errno.EPERM


def test_setuid_is_refused(there: Hostile) -> None:
    assert set(there.meet("become_root").told) == {"PermissionError"}
    assert there.meet("setuid_programs").told == []


@native
def test_setuid_is_refused_to_a_program_of_its_own(there: Hostile) -> None:
    assert system_call(there, "setuid", 0) == errno.EPERM


def test_the_root_file_system_is_not_written(there: Hostile) -> None:
    assert there.meet("writable_folders", fresh=True).told == ["/tmp"]
    assert set(there.meet("writable_kernel_files").told) <= {"PermissionError", "OSError", "FileNotFoundError"}
    assert set(there.meet("poison_the_image").told) == {"OSError"}


def test_nothing_is_executed_from_tmpfs(there: Hostile) -> None:
    assert there.meet("run_from_tmp", fresh=True).told == "PermissionError"


def test_terminal_escapes_reach_no_screen(there: Hostile) -> None:
    error = there.meet("speak_to_the_terminal").error
    assert isinstance(error, EnvironmentFault)
    words = r"\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
    assert error.error == rf"ValueError: {words}\udcff"
    assert {sign for sign in error.traceback if not sign.isprintable()} == {"\n"}
    assert there.run(there.source.effects())["printed_head"] == words + "\n"
    there.meet("nothing", fresh=True)


def test_sitecustomize_conftest_and_import_paths_poison_nobody(there: Hostile) -> None:
    path = there.meet("import_path").told
    assert not {"", ".", "/tmp"} & set(path)
    out, errors = there.meet("poison", fresh=True).told
    assert (out, errors) == ("/app/sandbox/worker.py\n", "")
    assert there.meet("import_path").told == path


def test_no_state_leaks_between_two_episodes(there: Hostile, lamp_shop: str) -> None:
    """An environment that keeps no global keeps nothing: what one episode did shows in no other of its container."""

    async def main() -> None:
        async with SandboxSource(lamp_shop) as source:
            play = await source.oracle(3)
            one, other = source.episode(), source.episode()
            first = await one.reset(3)
            for turn in play.turns:
                await one.step(turn.message)
            assert (await one.score()).success
            assert await other.reset(3) == first
            assert not (await other.score()).success
            assert [(await other.step(turn.message)).messages for turn in play.turns] == [
                turn.replies for turn in play.turns
            ]

    asyncio.run(main())


def test_no_state_leaks_between_two_runs(there: Hostile) -> None:
    """What a container's globals, variables and files hold ends with it."""
    assert there.meet("leave_a_mark").told == ["mark", "mark", "MARK"]
    assert there.meet("look_for_marks", fresh=True).told == ["mark", "mark", "MARK"]
    assert there.meet("look_for_marks").told == []


def test_no_state_leaks_between_two_containers(there: Hostile) -> None:
    async def main() -> Any:
        async with SandboxSource(there.source.source_code, limits=LIMITS, owner=owner("escapes")) as source:
            mine = Hostile(asyncio.Runner(), source)
            return await mine.order(await mine.begun(), "look_for_marks")

    assert there.meet("leave_a_mark").told == ["mark", "mark", "MARK"]
    assert there.run(main()) == []
    there.meet("nothing", fresh=True)
