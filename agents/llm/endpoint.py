"""Describes a model behind an OpenAI-compatible server (address, key, limits, prices) and estimates tokens.

The key appears in no repr, log or error; ``Endpoint.clean`` removes it from the server's texts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr

from agents.llm.question import ChatMessage

# Bytes of UTF-8: English prose has four or more per token, code and JSON three.
BYTES_PER_TOKEN = 3.5
TOKENS_PER_MESSAGE = 4
REDACTED = "***"
# Shorter keys ("none", "EMPTY") are placeholders; redacting them would damage ordinary texts.
MIN_KEY_LENGTH = 8


@dataclass(frozen=True)
class Endpoint:
    """A model and how to reach it. Prices are per million tokens; a limit of 0 means no limit."""

    base_url: str
    model: str
    key: SecretStr
    # Limit for the whole answer.
    timeout_s: float = 600.0
    prompt_price: float = 0.0
    completion_price: float = 0.0
    # Limit between two chunks of an answer, and before the first.
    silence_s: float = 120.0
    connect_s: float = 10.0
    # How long a failing request is retried.
    patience_s: float = 300.0
    concurrency: int = 8
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    # Prompt and answer together; 0 means unknown.
    context_tokens: int = 0
    # The section of the settings that hints refer to.
    section: str = "llm"

    @property
    def name(self) -> str:
        """The name used in error messages."""
        return f"the model {self.model} at {self.base_url}"

    @property
    def check_command(self) -> str:
        """The command that tests the endpoint."""
        return "traced llm check --user" if self.section == "target.user" else "traced llm check"

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    def contains_key(self, text: str) -> bool:
        """Return whether a text contains the API key. Keys below ``MIN_KEY_LENGTH`` count as placeholders."""
        key = self.key.get_secret_value()
        return len(key) >= MIN_KEY_LENGTH and key in text

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """Return the price of these tokens."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    def clean(self, text: str) -> str:
        """Return a server's text without the key, NUL characters and lone surrogates, safe to store and to display."""
        redacted = text.replace(self.key.get_secret_value(), REDACTED) if self.contains_key(text) else text
        return redacted.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def estimated_tokens(text: str) -> int:
    """Estimate the tokens in a text."""
    return math.ceil(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)


def prompt_tokens(messages: Iterable[ChatMessage]) -> int:
    """Estimate the tokens in a dialogue."""
    return sum(estimated_tokens(message.text) + TOKENS_PER_MESSAGE for message in messages)
