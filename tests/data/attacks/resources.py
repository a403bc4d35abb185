"""Bombs, floods, fills, and code that will not end."""

import collections
import itertools
import mmap
import os
import signal
import threading
import time
from multiprocessing import shared_memory

LIMIT = 100_000


def fork_bomb():
    count = 0
    try:
        while count < LIMIT:
            if os.fork() == 0:
                time.sleep(600)
                os._exit(0)
            count += 1
    except OSError as error:
        return [count, type(error).__name__]
    return [count, "no limit"]


def thread_bomb():
    count = 0
    try:
        while count < LIMIT:
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            count += 1
    except RuntimeError as error:
        return [count, type(error).__name__]
    return [count, "no limit"]


def memory_bomb():
    held = []
    while True:
        held.append(bytearray(10_000_000))


def memory_bomb_in_a_child():
    child = os.fork()
    if child == 0:
        memory_bomb()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shared_memory_segment():
    try:
        shared_memory.SharedMemory("hoard", create=True, size=1 << 40)
    except OSError as error:
        return type(error).__name__
    return "made"


def sparse_memory():
    file = os.memfd_create("hoard")
    os.ftruncate(file, 1 << 40)  # a terabyte of nothing
    held = mmap.mmap(file, 1 << 30)
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    return "held"


def endless_loop():
    while True:
        pass


def deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    collections.deque(itertools.repeat(0), maxlen=0)


def survivor():
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    return "left"


def leave():
    os._exit(0)


def ring_the_alarm():
    os.kill(os.getpid(), signal.SIGALRM)


def kill_myself():
    os.kill(os.getpid(), signal.SIGKILL)


def _flood(data):
    for descriptor in range(3, 20):
        try:
            while True:
                os.write(descriptor, data)
        except OSError:
            continue


def flood_of_lines():
    _flood(b"x\n" * 32768)


def flood_without_an_end_of_line():
    _flood(b"x" * 65536)


def flood_of_the_inits_stderr(end_of_line):
    with open("/proc/1/fd/2", "wb", buffering=0) as file:
        while True:
            file.write((b"\x1b[2J" + end_of_line.encode()) * 16384)


def printed_flood():
    for _ in range(20_000):
        print("x" * 1000)
    return "printed"


def fill_of_the_disk():
    written = 0
    try:
        with open("/tmp/big", "wb", buffering=0) as file:
            while written < 1 << 30:
                written += file.write(b"x" * (1 << 20))
    except OSError as error:
        return [written, error.errno]
    return [written, "no limit"]


def fill_of_the_inodes():
    count = 0
    try:
        while count < LIMIT:
            os.close(os.open(f"/tmp/{count}", os.O_CREAT))
            count += 1
    except OSError as error:
        return [count, error.errno]
    return [count, "no limit"]


def fill_of_depth():
    count = 0
    try:
        while count < LIMIT:
            os.mkdir("d")
            os.chdir("d")
            count += 1
    except OSError as error:
        return [count, error.errno]
    finally:
        os.chdir("/tmp")
    return [count, "no limit"]


def litter():
    """What would catch a host that reads files back: it finds nothing to read."""
    os.symlink("/etc/passwd", "/tmp/link")
    os.symlink("../../../../etc/shadow", "/tmp/result.json")
    os.mkfifo("/tmp/fifo")
    os.mkdir("/tmp/a\n..\x1b[2J")
    try:
        os.mknod("/tmp/device", 0o60666, os.makedev(8, 0))
    except OSError as error:
        return type(error).__name__
    return "made"


def traceback_through_a_fifo():
    os.mkfifo("/tmp/source.py")
    exec(compile("raise ValueError", "/tmp/source.py", "exec"))
