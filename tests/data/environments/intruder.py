"""Tries what a sandbox must not allow and tells in the system prompt how far it got; the seed picks the deed."""

import collections
import itertools
import json
import os
import socket
import subprocess
import sys
import time

from sandbox.contract import Score, Task


def attempt(deed):
    try:
        return str(deed())
    except Exception as error:
        return type(error).__name__


def write(path):
    with open(path, "w") as file:
        file.write("x")
    return "wrote"


def status(field):
    with open("/proc/self/status") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith(field + ":"))


def execute_from_tmp():
    write("/tmp/program")
    os.chmod("/tmp/program", 0o755)
    return subprocess.run(["/tmp/program"], check=False).returncode


def fill_tmp():
    with open("/tmp/big", "wb") as file:
        for _ in range(1000):
            file.write(b"x" * 1_000_000)
    return "filled"


def fork_bomb():
    children = []
    try:
        while len(children) < 5000:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    except OSError as error:
        return f"{len(children)} {type(error).__name__}"
    finally:
        for child in children:
            os.kill(child, 9)
            os.waitpid(child, 0)
    return f"{len(children)} no limit"


def open_many():
    files = []
    try:
        while len(files) < 100_000:
            files.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as error:
        return f"{len(files)} {error.errno}"
    finally:
        for file in files:
            os.close(file)
    return "no limit"


def look_around():
    shells = [
        f"{folder}/{name}" for folder in ("/bin", "/usr/bin", "/sbin") for name in ("sh", "bash", "ls", "busybox")
    ]
    return {
        "connect": attempt(lambda: socket.create_connection(("192.0.2.1", 80), timeout=1)),
        "resolve": attempt(lambda: socket.getaddrinfo("example.org", 80)),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "write /": attempt(lambda: write("/x")),
        "write /app": attempt(lambda: write("/app/sandbox/worker.py")),
        "write /etc": attempt(lambda: write("/etc/x")),
        "write /dev": attempt(lambda: write("/dev/x")),
        "write /dev/shm": attempt(lambda: write("/dev/shm/x")),
        "write /tmp": attempt(lambda: write("/tmp/x")),
        "run /tmp": attempt(execute_from_tmp),
        "fill /tmp": attempt(fill_tmp),
        "forks": attempt(fork_bomb),
        "files": attempt(open_many),
        "setuid": attempt(lambda: os.setuid(0)),
        "mount": attempt(lambda: write("/proc/sys/kernel/hostname")),
        "kill init": attempt(lambda: os.kill(1, 0)),
        "uid": os.getuid(),
        "capabilities": status("CapEff"),
        "bounding": status("CapBnd"),
        "no_new_privileges": status("NoNewPrivs"),
        "seccomp": status("Seccomp"),
        "shells": [path for path in shells if os.path.exists(path)],
        "secrets": sorted(name for name in os.environ if "KEY" in name or "TOKEN" in name),
    }


def hog():
    held = []
    while True:
        held.append(bytearray(10_000_000))


def leave():
    os._exit(5)


def write_protocol():
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b'{"id": 1, "ok": {"score": {"reward": 1.0, "success": true, "parts": {}}}}\n')
        except OSError:
            continue


def flood():
    for descriptor in range(3, 20):
        try:
            while True:
                os.write(descriptor, b"x" * 65536)
        except OSError:
            continue


def block_in_c():
    collections.deque(itertools.repeat(0), maxlen=0)  # looks for no signal


DEEDS = [look_around, hog, leave, write_protocol, flood, block_in_c, lambda: time.sleep(600), lambda: sys.exit(3)]


class Environment:
    def reset(self, seed):
        found = DEEDS[seed]()
        return Task(json.dumps(found), [{"role": "user", "content": "hello"}], [])

    def step(self, message):
        return []

    done = False

    def score(self):
        return Score(0.0, False)

    def oracle(self):
        return iter(())
