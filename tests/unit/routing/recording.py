"""A policy that stands in for a model where only the choice of the model is tested."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RecordingPolicy:
    """A policy that only records which model was used."""

    client: Any
    model: str

    async def complete(self, *_: Any, **__: Any) -> str:
        """Record the model in ``client.models`` and return its name."""
        self.client.models.append(self.model)
        return self.model
