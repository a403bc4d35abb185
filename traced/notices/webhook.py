"""A webhook: one POST of the notice as JSON, signed where a secret is given.

Follows the Standard Webhooks specification (1.0): ``webhook-id`` stays the same over all tries, so that a receiver can
tell a repetition; ``webhook-signature`` is "v1," and the base64 HMAC-SHA256 of ``id.timestamp.body``; a secret that
begins with "whsec_" is base64, any other counts as it is. Only a 2xx answer is a delivery; redirects are not followed.

The answer's body is not read.

Fails: ``DeliveryFailed`` and ``HookUnusable``; neither says the URL, for it may be a secret itself.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
from datetime import datetime
from pathlib import Path

import httpx

from traced.notices.errors import DeliveryFailed, HookUnusable
from traced.notices.settings import WebhookSettings

AGENT = "traced-webhook"


async def post(hook: WebhookSettings, notice_id: str, body: bytes, *, timeout_s: float, now: datetime) -> None:
    """Deliver ``body`` or raise."""
    headers = {"content-type": "application/json", "user-agent": AGENT, "webhook-id": notice_id}
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
    signed = b".".join((notice_id.encode(), timestamp.encode(), body))
    return f"v1,{base64.b64encode(hmac.new(secret, signed, hashlib.sha256).digest()).decode()}"


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
