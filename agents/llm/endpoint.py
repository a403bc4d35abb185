"""A server and a model on it: where it is, how it may be asked, what it costs; and how long a text is, by estimate.

Invariant: the key appears in no repr, log or error; what comes from the server has it struck out (``Endpoint.clean``).
Not covered: exact token counts, which only the server has.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from pydantic import SecretStr

from agents.llm.question import Said

BYTES_PER_TOKEN = 3.5  # of UTF-8: English prose has 4 and more, code and JSON 3
TOKENS_PER_MESSAGE = 4
STRUCK = "***"
SHORTEST_KEY = 8  # what is shorter ("none", "EMPTY") is no secret, and striking it out would spoil texts


@dataclass(frozen=True)
class Endpoint:
    """A model behind an OpenAI-compatible server; prices are per million tokens, and a bound of 0 is none."""

    base_url: str
    model: str
    key: SecretStr
    timeout_s: float = 600.0  # for a whole answer
    prompt_price: float = 0.0
    completion_price: float = 0.0
    silence_s: float = 120.0  # between two pieces of an answer, and before the first
    connect_s: float = 10.0
    patience_s: float = 300.0  # for how long a request that fails is tried again
    concurrency: int = 8
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    context_tokens: int = 0  # of a prompt and its answer together; 0 is not known
    section: str = "llm"  # of the settings, for hints

    @property
    def name(self) -> str:
        """How errors call it."""
        return f"the model {self.model} at {self.base_url}"

    @property
    def is_here(self) -> bool:
        """Whether its server is on this machine."""
        host = urlsplit(self.base_url).hostname or ""
        try:
            return host == "localhost" or ip_address(host).is_loopback
        except ValueError:
            return False

    def holds_key(self, text: str) -> bool:
        """Whether a text has the key in it."""
        key = self.key.get_secret_value()
        return len(key) >= SHORTEST_KEY and key in text

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """What so many tokens cost."""
        return (prompt_tokens * self.prompt_price + completion_tokens * self.completion_price) / 1e6

    def clean(self, text: str) -> str:
        """Others' text as it may be kept and shown: without the key, NUL and halves of characters."""
        told = text.replace(self.key.get_secret_value(), STRUCK) if self.holds_key(text) else text
        return told.replace("\0", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has."""
    return math.ceil(len(text.encode("utf-8", "surrogatepass")) / BYTES_PER_TOKEN)


def prompt_tokens(said: Iterable[Said]) -> int:
    """About how many tokens a dialogue has."""
    return sum(estimated_tokens(one.text) + TOKENS_PER_MESSAGE for one in said)
