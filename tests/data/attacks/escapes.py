"""Ways out: the network, secrets, privileges, and files that others might run."""

import os
import socket
import struct
import subprocess
import sys

HELD = []  # outlives an episode, not its container


def _refused(deed):
    try:
        return repr(deed())
    except OSError as error:
        return type(error).__name__


def look_up_a_name():
    return _refused(lambda: socket.getaddrinfo("example.org", 80))


def connect_to(family, address):
    def deed():
        with socket.socket(getattr(socket, family)) as made:
            made.settimeout(1)
            made.connect(tuple(address) if isinstance(address, list) else address.encode("latin-1"))

    return _refused(deed)


def raw_sockets():
    kinds = [
        (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
        (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
        (socket.AF_PACKET, socket.SOCK_RAW, 0),
    ]
    return [_refused(lambda kind=kind: socket.socket(*kind)) for kind in kinds]


def vsock():
    return _refused(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close())


def interfaces():
    return [name for _, name in socket.if_nameindex()]


def variables():
    return dict(os.environ)


def _read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("latin-1")
    except OSError:
        return ""


def everything_proc_tells():
    pids = [name for name in os.listdir("/proc") if name.isdecimal()]
    files = ("environ", "cmdline", "mountinfo", "mounts", "cgroup", "status", "maps")
    texts = [_read(f"/proc/{pid}/{name}") for pid in pids for name in files]
    whole = [_read(f"/proc/{name}") for name in ("cmdline", "keys", "kcore", "sched_debug", "timer_list")]
    return {"pids": sorted(map(int, pids)), "text": "\n".join(texts + whole)[:500_000]}


def mounts():
    lines = _read("/proc/self/mountinfo").splitlines()
    return [[line.split()[3], line.split()[4], line.partition(" - ")[2].split()[0]] for line in lines]


def files_of_the_engine():
    return {path: _read(path) for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")}


def engine_sockets():
    found = []
    for folder, _, names in os.walk("/", followlinks=False):
        if folder.startswith(("/proc", "/sys")):
            continue
        found += [name for name in names if name.endswith(".sock")]
    return found


def system_call(number, arguments):
    """The error's number that a call answers with, 0 for none; arguments are numbers, or text to point to.

    There is no ctypes here: a program is made and started from memory, which no mount option forbids.
    """
    base = 0x400000
    code, data = b"", b""
    registers = [b"\x48\xbf", b"\x48\xbe", b"\x48\xba", b"\x49\xba", b"\x49\xb8"]
    start = 64 + 56
    length = 5 + 10 * len(registers) + 2 + 3 + 3 + 3 + 2 + 3 + 5 + 2
    code += b"\xb8" + struct.pack("<I", number)
    for register, value in zip(registers, [*arguments, 0, 0, 0, 0, 0], strict=False):
        if isinstance(value, str):
            value, data = base + start + length + len(data), data + value.encode("latin-1") + b"\0"
        code += register + struct.pack("<Q", value)
    code += b"\x0f\x05\x48\xf7\xd8\x48\x89\xc7\x48\x85\xff\x7f\x03\x48\x31\xff\xb8\x3c\0\0\0\x0f\x05"
    size = start + len(code) + len(data)
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + start, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    header += struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 4096)
    file = os.memfd_create("program", 0)
    os.write(file, header + code + data)
    return subprocess.run([f"/proc/self/fd/{file}"], pass_fds=[file], check=False).returncode


def become_root():
    return [_refused(lambda: os.setuid(0)), _refused(lambda: os.setgid(0)), _refused(lambda: os.setgroups([0]))]


def setuid_programs():
    found = []
    for folder, _, names in os.walk("/"):
        if folder.startswith(("/proc", "/sys")):
            continue
        paths = [os.path.join(folder, name) for name in names]
        found += [path for path in paths if os.path.lexists(path) and os.lstat(path).st_mode & 0o6000]
    return found


def writable_folders():
    found = []
    for folder, _, _ in os.walk("/"):
        if folder.startswith("/proc"):
            continue
        try:
            os.close(os.open(os.path.join(folder, "mine"), os.O_CREAT | os.O_WRONLY))
            found.append(folder)
        except OSError:
            continue
    return found


def writable_kernel_files():
    paths = ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/panic_on_oom", "/proc/sysrq-trigger", "/sys/power/state"]
    return [_refused(lambda path=path: open(path, "w")) for path in paths]


def run_from_tmp():
    with open("/tmp/program", "wb") as file, open("/proc/self/exe", "rb") as own:
        file.write(own.read(1 << 20))
    os.chmod("/tmp/program", 0o755)
    return _refused(lambda: subprocess.run(["/tmp/program"], check=False))


def poison():
    """Files that an interpreter might load from where it stands."""
    for name in ("sitecustomize", "usercustomize", "conftest", "json", "random", "hashlib", "encodings"):
        with open(f"/tmp/{name}.py", "w") as file:
            file.write("print('poisoned')\n")
    os.makedirs("/tmp/sandbox", exist_ok=True)
    with open("/tmp/sandbox/__init__.py", "w") as file:
        file.write("print('poisoned')\n")
    flags = ["-P", "-s", "-S", "-B"]  # those of the image's entry point
    script = "import json, random, hashlib, sandbox.worker; print(sandbox.worker.__file__)"
    command = [sys.executable, *flags, "-c", script]
    made = subprocess.run(command, capture_output=True, text=True, cwd="/tmp", check=False)
    return [made.stdout, made.stderr]


def poison_the_image():
    return [_refused(lambda path=path: open(path, "w")) for path in ("/app/sandbox/worker.py", os.__file__)]


def import_path():
    return sys.path


def leave_a_mark():
    HELD.append("mark")
    os.environ["MARK"] = "mark"
    with open("/tmp/mark", "w") as file:
        file.write("mark")
    return look_for_marks()


def look_for_marks():
    files = [name for name in os.listdir("/tmp") if name == "mark"]
    return [*HELD, *files, *(name for name in os.environ if name == "MARK")]


def speak_to_the_terminal():
    words = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
    print(words)
    raise ValueError(words + b"\xff".decode("utf-8", "surrogateescape"))
