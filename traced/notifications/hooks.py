"""A webhook: one POST of the notice as JSON, signed where a secret is given.

Follows the Standard Webhooks specification (1.0): ``webhook-id`` stays the same over all tries, so that a receiver can
tell a repetition; ``webhook-signature`` is "v1," and the base64 HMAC-SHA256 of ``id.timestamp.body``; a secret that
begins with "whsec_" is base64, any other counts as it is. Only a 2xx answer is a delivery; redirects are not followed.

The answer's body is not read.

Fails: ``DeliveryFailed`` and ``HookUnusable``; neither says the URL, for it may be a secret itself.

What can go wrong when a hook is told.

    TracedError
    └── NoticeError
        ├── DeliveryFailed   the hook did not take the notice (refused, silent, gone); it is tried again
        └── HookUnusable     the hook's own settings stand in the way (no such program, no such secret)

Both end in the notice's ``last_error`` and in the log, never in the caller: a dead hook blocks nothing.

A command hook: a program that gets the notice as JSON on its standard input.

Invariants: no shell takes part; exit status 0 is a delivery and nothing else is; past the time limit the program and
all that it started in its process group are killed. The end of its standard error, without secrets, goes into the
failure's text; its standard output is thrown away.
Fails: ``DeliveryFailed`` (exit status, signal, time limit), ``HookUnusable`` (it cannot be started).
Not covered: what it leaves behind in a session of its own.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import httpx

from traced.config.service_sections import CommandSettings, WebhookSettings
from traced.core.errors import TracedError
from traced.core.redaction import redacted_text


class NoticeError(TracedError):
    """A hook was not told."""


class DeliveryFailed(NoticeError):
    """The hook did not take the notice."""


class HookUnusable(NoticeError):
    """The hook's own settings stand in the way."""


USER_AGENT = "traced-webhook"


async def post_webhook(hook: WebhookSettings, notice_id: str, body: bytes, *, timeout_s: float, now: datetime) -> None:
    """Deliver ``body`` or raise."""
    headers = {"content-type": "application/json", "user-agent": USER_AGENT, "webhook-id": notice_id}
    headers["webhook-timestamp"] = str(int(now.timestamp()))
    if hook.secret_file:
        headers["webhook-signature"] = signature(_secret(hook), notice_id, headers["webhook-timestamp"], body)
    try:
        async with (
            asyncio.timeout(timeout_s),  # httpx limits each read, not their sum
            httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client,
            client.stream("POST", hook.url, content=body, headers=headers) as answer,
        ):
            code = answer.status_code
    except (TimeoutError, httpx.TimeoutException) as error:
        raise DeliveryFailed(f"webhook {hook.name}: no answer within {timeout_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeliveryFailed(f"webhook {hook.name}: {type(error).__name__}") from error
    if not 200 <= code < 300:
        raise DeliveryFailed(f"webhook {hook.name}: it answered {code}")


def signature(secret: bytes, notice_id: str, timestamp: str, body: bytes) -> str:
    """The value of ``webhook-signature`` for ``body``."""
    content = b".".join((notice_id.encode(), timestamp.encode(), body))
    return f"v1,{base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()}"


def _secret(hook: WebhookSettings) -> bytes:
    hint = f"write the secret of webhook {hook.name} into {hook.secret_file}"
    try:
        text = Path(hook.secret_file).read_text(encoding="utf-8").strip()
        secret = (
            base64.b64decode(text.removeprefix("whsec_"), validate=True) if text.startswith("whsec_") else text.encode()
        )
    except (OSError, UnicodeDecodeError, binascii.Error) as error:
        raise HookUnusable(f"webhook {hook.name}: its secret cannot be read: {error}", hint=hint) from error
    if not secret:
        raise HookUnusable(f"webhook {hook.name}: its secret is empty", hint=hint)
    return secret


STDERR_BYTES = 4096  # bytes
MAX_ERROR_CHARACTERS = 500  # characters
READ_BYTES = 65_536


async def run_command(hook: CommandSettings, body: bytes, *, timeout_s: float) -> None:
    """Deliver ``body`` or raise."""
    try:
        process = await asyncio.create_subprocess_exec(
            *hook.argv, stdin=PIPE, stdout=DEVNULL, stderr=PIPE, start_new_session=True
        )
    except (OSError, ValueError) as error:
        raise HookUnusable(
            f"command {hook.name}: {hook.argv[0]!r} cannot be started: {error}", hint=f"ls -l {hook.argv[0]}"
        ) from error
    finished = False
    try:
        async with asyncio.timeout(timeout_s):
            _, stderr, code = await asyncio.gather(_feed(process, body), _read_stderr_tail(process), process.wait())
        finished = True
    except TimeoutError as error:
        raise DeliveryFailed(f"command {hook.name}: not done after {timeout_s:g} s, killed") from error
    finally:
        if not finished:
            await _kill(process)
    if code:
        status = f"exit status {code}" if code > 0 else f"signal {-code}"
        raise DeliveryFailed(f"command {hook.name}: {status}: {_stderr_text(stderr)}")


async def _feed(process: Process, body: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(body)
    with suppress(BrokenPipeError, ConnectionResetError):  # it does not care for the details
        await process.stdin.drain()
    process.stdin.close()


async def _read_stderr_tail(process: Process) -> bytes:
    assert process.stderr is not None
    tail = b""
    while chunk := await process.stderr.read(READ_BYTES):
        tail = (tail + chunk)[-STDERR_BYTES:]
    return tail


def _stderr_text(stderr: bytes) -> str:
    """The end of ``said``: whole lines, for half a line may hold a secret without the name that gives it away."""
    text = stderr.decode("utf-8", "replace")
    complete_lines = text if len(stderr) < STDERR_BYTES else text.partition("\n")[2]
    return redacted_text(complete_lines).strip()[-MAX_ERROR_CHARACTERS:]


async def _kill(process: Process) -> None:
    """Kill the group: its leader may be gone while others hold its pipes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
