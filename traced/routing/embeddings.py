"""Sources of embeddings for the fitted router: an engine's hidden states, or a server beside the engines.

A fitted router decides only on embeddings that equal those it was fitted on. Names do not prove that, so its file keeps
the embedding of one fixed text, and ``EmbeddingIdentity.mismatch`` compares it with that of the present source. A
server beside the engines may be any with OpenAI's ``/v1/embeddings``: vLLM with ``--runner pooling``, TEI, or the
embedded engine with a small model. Errors: ``EmbeddingsError``, and those of ``EngineClient``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traced.inference.client import BASE, EngineClient
from traced.inference.errors import EmbeddingsError, RequestError, UnknownModelError

PROBE_TEXT = "Please return order W1234, and pay the difference by card."
# Relative distance of two embeddings of the same text by the same weights, at most. bfloat16 differs from float32 by
# less than a hundredth; other weights by more than a tenth.
TOLERANCE = 0.05


@dataclass(frozen=True)
class EmbeddingIdentity:
    """What a router was fitted on: the name of the model, and its embedding of ``PROBE_TEXT``."""

    model: str
    probe: list[float]

    def mismatch(self, other: "EmbeddingIdentity") -> str:
        """Return why the embeddings of ``other`` are not these, or "" if they are."""
        if len(self.probe) != len(other.probe):
            return f"fitted on embeddings of {self.model} (size {len(self.probe)}), not {_describe(other)}"
        distance = np.linalg.norm(np.subtract(self.probe, other.probe)) / (np.linalg.norm(self.probe) or 1.0)
        if not distance <= TOLERANCE:
            return (
                f"fitted on embeddings of {self.model}, not {_describe(other)}: for the same text they differ by "
                f"{100 * distance:.0f} %"
            )
        return ""


@dataclass(frozen=True)
class EmbeddingSource:
    """A client and the model that it requests embeddings of; ``BASE`` means the hidden states of an engine's base."""

    client: EngineClient
    model: str = BASE

    @property
    def url(self) -> str:
        """Return the server's URL."""
        return self.client.url

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Return one vector per text, in order; raises the client's errors."""
        return await self.client.embeddings(texts, self.model)

    async def identity(self) -> EmbeddingIdentity:
        """Return the identity of the embeddings.

        Raises:
            EmbeddingsError: The server offers no embeddings of this model.
            EngineError: The server failed or does not answer.
        """
        try:
            (probe,) = await self.embed([PROBE_TEXT])
        except UnknownModelError as error:
            raise EmbeddingsError(f"{self.url} has no embeddings (POST /v1/embeddings: 404)") from error
        except RequestError as error:
            raise EmbeddingsError(f"{self.url} has no embeddings: {error.message}") from error
        return EmbeddingIdentity(self.model, [float(value) for value in probe])


async def source_beside(client: EngineClient, model: str) -> EmbeddingSource:
    """Return the source at ``routing.embeddings_url``.

    Args:
        model: ``routing.embeddings_model``; "" for the only model that the server lists.

    Raises:
        EmbeddingsError: The server lists no model or several.
        EngineError: The server does not answer.
    """
    if model:
        return EmbeddingSource(client, model)
    try:
        models = await client.models()
    except RequestError as error:
        raise EmbeddingsError(f"{client.url} lists no models", hint="set routing.embeddings_model") from error
    if len(models) != 1:
        raise EmbeddingsError(
            f"{client.url} lists {len(models)} models ({', '.join(models)})", hint="set routing.embeddings_model"
        )
    return EmbeddingSource(client, models[0])


def _describe(identity: EmbeddingIdentity) -> str:
    return f"of {identity.model} (size {len(identity.probe)})"
