"""Customers of an agent: their names are read from the traffic, and only a keyed hash of a name is stored.

The key is in the store, so that all routers and imports with one store give a customer the same hash. Whoever has the
whole database can verify a guess of a name. Not covered: customers who are named in the text of messages
(``traced.ingest.redaction``), and one customer with several names.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine

from store.database import write_session
from store.repositories.serving import customer_key

CUSTOMER_HEADER = "X-Traced-Customer"
# Fields of a request that name its user: those of OpenAI's forms, and of metadata (Anthropic's form: user_id).
USER_FIELDS = ("user", "safety_identifier")
METADATA_FIELDS = ("customer", "user_id")
# Fields that may name the customer in another way; none of them is part of a stored exchange.
PRIVATE_FIELDS = (*USER_FIELDS, "prompt_cache_key", "metadata")
PREFIX = "customer-"


@dataclass(frozen=True)
class CustomerHash:
    """Hashes customers' names with a key of 32 bytes."""

    key: bytes

    def __call__(self, name: object) -> str:
        """Return the hash of a name; "" if it is none."""
        text = str(name).strip() if isinstance(name, str | int) and not isinstance(name, bool) else ""
        if not text:
            return ""
        digest = hmac.new(self.key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()
        return f"{PREFIX}{digest[:24]}"

    def redaction_key(self) -> bytes:
        """Return the key of the pseudonyms of redacted text (``traced.ingest.redaction``)."""
        return hmac.digest(self.key, b"redaction", hashlib.sha256)

    def first(self, fields: Mapping[str, Any], names: Sequence[str]) -> str:
        """Return the hash of the first of these fields that has a name; "" without one."""
        return next((hashed for name in names if (hashed := self(fields.get(name)))), "")

    def of_request(self, header: str, body: Mapping[str, Any]) -> str:
        """Return the customer of a request to the model; "" if it names none.

        Args:
            header: The value of ``CUSTOMER_HEADER``, which precedes the fields of the body.
            body: The body of the request in any form.
        """
        metadata = body.get("metadata")
        of_metadata = self.first(metadata, METADATA_FIELDS) if isinstance(metadata, Mapping) else ""
        return self(header) or self.first(body, USER_FIELDS) or of_metadata


def customer_hash(store: Engine) -> CustomerHash:
    """Return the hash with the key of the store, which is created at its first use; raises ``StoreError``."""
    with write_session(store) as session:
        return CustomerHash(bytes.fromhex(customer_key(session, secrets.token_hex(32))))


def without_private_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request without the fields that may name a customer."""
    return {name: value for name, value in body.items() if name not in PRIVATE_FIELDS}
