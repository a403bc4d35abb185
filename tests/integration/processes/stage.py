"""A child that does what it is told: ``python -m tests.integration.processes.stage JOB.json``.

Arguments: ``do`` names one of the functions below, the rest is theirs.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from sandbox.errors import EngineDown
from traced.core.errors import CapabilityError
from traced.processes.child import Reporter, run_child
from traced.training.errors import TrainingPaused

FOREVER = [sys.executable, "-c", "import signal; signal.pause()"]


def wait_for_signals() -> dict[str, Any]:
    """Not pause(2), which misses a signal that comes just before it."""
    forever = threading.Event()
    while not forever.wait(0.05):
        continue
    return {}


def succeed(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    for done in range(arguments.get("steps", 2)):
        reporter.progress("steps", done, note="ü")
    return {"pid": os.getpid(), "echo": arguments.get("echo"), "variable": os.environ.get("STAGE_VARIABLE")}


def fail(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Exception] = {
        "docker": EngineDown("refused"),
        "answer": CapabilityError("the gate said no", hint="look"),
        "paused": TrainingPaused("paused after iteration 2 of 4"),
    }
    raise kinds.get(arguments["error"]) or KeyError(arguments["error"])


def fail_in_a_task(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    async def run_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(fail, reporter, {"error": "docker"}))

    asyncio.run(run_both())
    raise AssertionError


def hang(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Hold the GIL for ever, so that not even the heartbeat's thread runs."""
    reporter.progress("hanging")
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)  # PyDLL keeps the GIL
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)  # the second time for ever, whatever signals come
    raise AssertionError


def stall(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Heartbeats and the same counter again and again."""
    stuck = threading.Event()
    while True:
        reporter.progress("stuck", 7)
        stuck.wait(0.02)


def eat_memory(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """In a grandchild, so that only a look at the whole tree sees it."""
    code = "import signal; eaten = bytearray(b'x') * (1 << 28); signal.pause()"
    subprocess.run([sys.executable, "-c", code], check=True)
    return {}


def share_memory(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fork with 64 MiB that nobody writes to: counted four times by resident size, once in truth."""
    shared = bytearray(b"x") * (1 << 26)
    read_end, write = os.pipe()
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os.close(write)
            os.read(read_end, 1)
            os._exit(0)
        children.append(pid)
    for done in range(arguments["steps"]):
        reporter.progress("sharing", done)
        threading.Event().wait(0.05)
    os.close(write)
    for pid in children:
        os.waitpid(pid, 0)
    return {"bytes": len(shared)}


def fork_and_leave(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Leave two processes behind: one in our group, one that made a session of its own."""
    try:
        pids = [subprocess.Popen(FOREVER, start_new_session=away).pid for away in (False, True)]
        reporter.progress("forked", pids=pids)
        return {"pids": pids} if arguments.get("end", True) else wait_for_signals()
    finally:
        Path(arguments.get("checkpoint", os.devnull)).write_text("whole")


def wait(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Wait to be stopped; write a checkpoint on the way out."""
    try:
        reporter.progress("waiting")
        wait_for_signals()
    finally:
        Path(arguments["checkpoint"]).write_text("whole")
    return {}


def wait_in_a_loop(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    async def main() -> None:
        try:
            reporter.progress("waiting")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an orderly end may need the loop
            Path(arguments["checkpoint"]).write_text("whole")

    asyncio.run(main())
    return {}


def ignore_sigterm(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    reporter.progress("deaf")
    return wait_for_signals()


def print_much(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    line = "x" * 1023 + "\n"
    for _ in range(arguments["mib"]):
        sys.stdout.write(line * 1024)
    print("the last line", file=sys.stderr, flush=True)
    return {}


def tell_secrets(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    for piece in ("in pieces: pass", "word=hun", "ter2\n", "token: hunter2"):  # the last one has no end
        os.write(1, piece.encode())
        threading.Event().wait(0.05)
    return {}


def kill_itself(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    reporter.progress("iteration", arguments.get("done", 0))
    print("last words", flush=True)
    os.kill(os.getpid(), getattr(signal, arguments.get("signal", "SIGKILL")))
    return wait_for_signals()


def crash(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    print("about to fall", flush=True)
    ctypes.string_at(0)
    return {}


def leave(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    os._exit(arguments["code"])


def babble(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    os.write(reporter._descriptor, b"no JSON\n")
    return wait(reporter, arguments)


def not_go(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Give a result, but hang while the interpreter ends."""
    threading.Thread(target=threading.Event().wait).start()
    return {"done": True}


def fail_times(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    """Fail as often as told, then succeed; counts in a file."""
    counter = Path(arguments["counter"])
    attempt = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(attempt + 1))
    if attempt < arguments["times"]:
        return {"crash": crash, "docker": fail}[arguments["how"]](reporter, {"error": "docker"})
    return {"tried": attempt + 1}


def work(reporter: Reporter, arguments: dict[str, Any]) -> dict[str, Any]:
    return globals()[arguments["do"]](reporter, arguments)


if __name__ == "__main__":
    sys.exit(run_child(work))
