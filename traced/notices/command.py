"""A command hook: a program that gets the notice as JSON on its standard input.

Invariants: no shell takes part; exit status 0 is a delivery and nothing else is; past the time limit the program and
all that it started in its process group are killed. The end of its standard error, without secrets, goes into the
failure's text; its standard output is thrown away.
Fails: ``DeliveryFailed`` (exit status, signal, time limit), ``HookUnusable`` (it cannot be started).
Not covered: what it leaves behind in a session of its own.
"""

import asyncio
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress

from traced.host.redaction import redacted_text
from traced.notices.errors import DeliveryFailed, HookUnusable
from traced.notices.settings import CommandSettings

KEPT = 4096  # bytes
SHOWN = 500  # characters
CHUNK = 65_536


async def run(hook: CommandSettings, body: bytes, *, timeout_s: float) -> None:
    """Deliver ``body`` or raise."""
    try:
        process = await asyncio.create_subprocess_exec(
            *hook.argv, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise HookUnusable(
            f"command {hook.name}: {hook.argv[0]!r} cannot be started: {error}", hint=f"ls -l {hook.argv[0]}"
        ) from error
    ended = False
    try:
        async with asyncio.timeout(timeout_s):
            _, said, code = await asyncio.gather(_feed(process, body), _last_words(process), process.wait())
        ended = True
    except TimeoutError as error:
        raise DeliveryFailed(f"command {hook.name}: not done after {timeout_s:g} s, killed") from error
    finally:
        if not ended:
            await _kill(process)
    if code:
        ending = f"exit status {code}" if code > 0 else f"signal {-code}"
        raise DeliveryFailed(f"command {hook.name}: {ending}: {_shown(said)}")


async def _feed(process: Process, body: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(body)
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not care for the details
        await process.stdin.drain()
    process.stdin.close()


async def _last_words(process: Process) -> bytes:
    assert process.stderr is not None
    kept = b""
    while chunk := await process.stderr.read(CHUNK):
        kept = (kept + chunk)[-KEPT:]
    return kept


def _shown(said: bytes) -> str:
    """The end of ``said``: whole lines, for half a line may hold a secret without the name that gives it away."""
    text = said.decode("utf-8", "replace")
    whole = text if len(said) < KEPT else text.partition("\n")[2]
    return redacted_text(whole).strip()[-SHOWN:]


async def _kill(process: Process) -> None:
    """Kill the group: its leader may be gone while others hold its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
