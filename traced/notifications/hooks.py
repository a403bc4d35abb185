"""Deliver a notice to a hook: an HTTP webhook, or a command that gets the notice as JSON on its standard input.

    TracedError
    └── NoticeError
        ├── DeliveryFailed   the hook did not accept the notice (refused, silent, gone); it is retried
        └── HookUnusable     the settings of the hook are wrong (no such program, no such secret)

Webhooks follow Standard Webhooks 1.0: ``webhook-id`` is the same for all tries, and ``webhook-signature`` is "v1," and
the base64 HMAC-SHA256 of ``id.timestamp.body``. A secret that begins with "whsec_" is base64, any other is used as it
is. Not covered: processes that a command leaves behind in another session.
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

from traced.config.service_sections import CommandSettings, WebhookSettings
from traced.core.errors import TracedError
from traced.core.redaction import redacted_text

USER_AGENT = "traced-webhook"
# How much of a command's standard error is kept, and how much of that is reported.
STDERR_BYTES = 4096
MAX_ERROR_CHARACTERS = 500
READ_BYTES = 65_536


class NoticeError(TracedError):
    """A notice was not delivered."""


class DeliveryFailed(NoticeError):
    """The hook did not accept the notice."""


class HookUnusable(NoticeError):
    """The settings of the hook are wrong."""


async def post_webhook(hook: WebhookSettings, notice_id: str, body: bytes, *, timeout_s: float, now: datetime) -> None:
    """POST a notice; only a 2xx response is a delivery. Raises NoticeError."""
    # Loaded when a webhook is first delivered, not when the daemon starts.
    import httpx

    headers = {"content-type": "application/json", "user-agent": USER_AGENT, "webhook-id": notice_id}
    headers["webhook-timestamp"] = str(int(now.timestamp()))
    if hook.secret_file:
        headers["webhook-signature"] = signature(_secret(hook), notice_id, headers["webhook-timestamp"], body)
    try:
        async with (
            # httpx limits each read, not their sum.
            asyncio.timeout(timeout_s),
            httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client,
            # Streamed, because the body of the response is never read.
            client.stream("POST", hook.url, content=body, headers=headers) as response,
        ):
            code = response.status_code
    except (TimeoutError, httpx.TimeoutException) as error:
        raise DeliveryFailed(f"webhook {hook.name}: no answer within {timeout_s:g} s") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Only the type: the message may hold the URL, which may be a secret itself.
        raise DeliveryFailed(f"webhook {hook.name}: {type(error).__name__}") from error
    if not 200 <= code < 300:
        raise DeliveryFailed(f"webhook {hook.name}: status {code}")


def signature(secret: bytes, notice_id: str, timestamp: str, body: bytes) -> str:
    """Return the value of ``webhook-signature`` for ``body``."""
    content = b".".join((notice_id.encode(), timestamp.encode(), body))
    return f"v1,{base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()}"


async def run_command(hook: CommandSettings, body: bytes, *, timeout_s: float) -> None:
    """Run a command with a notice on its standard input; only exit status 0 is a delivery. Raises NoticeError."""
    try:
        # Without a shell, and in its own session, so that _kill() can end all its processes.
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
        raise DeliveryFailed(f"command {hook.name}: did not finish within {timeout_s:g} s, killed") from error
    finally:
        if not finished:
            await _kill(process)
    if code:
        status = f"exit status {code}" if code > 0 else f"signal {-code}"
        raise DeliveryFailed(f"command {hook.name}: {status}: {_stderr_text(stderr)}")


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


async def _feed(process: Process, body: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(body)
    # A command need not read its input.
    with suppress(BrokenPipeError, ConnectionResetError):
        await process.stdin.drain()
    process.stdin.close()


async def _read_stderr_tail(process: Process) -> bytes:
    assert process.stderr is not None
    tail = b""
    while chunk := await process.stderr.read(READ_BYTES):
        tail = (tail + chunk)[-STDERR_BYTES:]
    return tail


def _stderr_text(stderr: bytes) -> str:
    text = stderr.decode("utf-8", "replace")
    # Redaction recognizes a secret by the name before it, which the cut may have removed from the first line.
    complete_lines = text if len(stderr) < STDERR_BYTES else text.partition("\n")[2]
    return redacted_text(complete_lines).strip()[-MAX_ERROR_CHARACTERS:]


async def _kill(process: Process) -> None:
    # The group, because its leader may be gone while its children hold the pipes.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
