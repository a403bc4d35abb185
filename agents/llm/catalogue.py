"""The models that a server lists, and how long a context it gives them, where it says so.

The protocol has no name for a context's length; these are the names that servers use: vLLM ``max_model_len``,
OpenRouter and Together ``context_length``, Groq ``context_window``, Mistral and LM Studio ``max_context_length``,
llama.cpp ``meta.n_ctx_train``. How it fails: ``Unlisted``, with the failure that asking for an answer would meet.
"""

from agents.llm import wire
from agents.llm.endpoint import Endpoint

PATIENCE_S = 15.0
CONTEXT = ("max_model_len", "context_length", "context_window", "max_context_length", "n_ctx", "n_ctx_train")


class Unlisted(Exception):
    """There is no list; ``failure`` is why (``wire.Transient``, ``wire.Misunderstood``, ``ModelRefused``)."""

    def __init__(self, failure: Exception) -> None:
        super().__init__(str(failure))
        self.failure = failure


async def listed(endpoint: Endpoint) -> dict[str, int]:
    """The server's models with their contexts in tokens, 0 where it does not tell; raises ``Unlisted``."""
    async with wire.chat(endpoint) as chat:
        try:
            found = await wire.models(chat, endpoint, PATIENCE_S)
        except Exception as error:  # whatever it is, asking for an answer will meet it and say so
            raise Unlisted(error) from None
    return {endpoint.clean(str(one.get("id"))): _context(one) for one in found}


def _context(told: dict[str, object]) -> int:
    meta = told.get("meta")
    both = {**(meta if isinstance(meta, dict) else {}), **told}
    for name in CONTEXT:
        length = both.get(name)
        if isinstance(length, int) and 0 < length < 2**31:
            return length
    return 0
