"""What an engine offers for routing: embeddings, labels that are single tokens, and its context.

It is asked once when the engine becomes available, because engines of one pool may differ, and again after the engine
was lost, because another may answer at its URL.
"""

from dataclasses import dataclass

from traced.inference.client import EngineClient
from traced.inference.errors import EmbeddingsError, RequestError, RoutingPromptError
from traced.inference.routing_prompt import LABELS
from traced.routing.embeddings import EmbeddingIdentity, EmbeddingSource


@dataclass(frozen=True)
class EnginePreflight:
    """What an engine offers for routing.

    Args:
        embeddings: The identity of its embeddings; None if it has none, for ``embeddings_problem``.
        label_problem: Why label tokens cannot decide; "" if they can.
        context: The context in tokens; 0 if the engine states none.
    """

    embeddings: EmbeddingIdentity | None
    embeddings_problem: str
    label_problem: str
    context: int


async def check_engine(client: EngineClient) -> EnginePreflight:
    """Ask an engine what it offers; raises ``EngineError`` if it fails or does not answer."""
    embeddings, embeddings_problem, label_problem = None, "", ""
    try:
        embeddings = await EmbeddingSource(client).identity()
    except EmbeddingsError as error:
        embeddings_problem = error.message
    try:
        await client.label_ids(LABELS)
    except RoutingPromptError as error:
        label_problem = error.message
    except RequestError as error:
        label_problem = f"{client.url} does not tokenize (POST /tokenize): {error.message}"
    return EnginePreflight(embeddings, embeddings_problem, label_problem, await client.context_length())
