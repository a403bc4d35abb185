"""Promotions and rollbacks during the traffic, and what each of them made of the versions."""

import asyncio
import random
import time
from dataclasses import dataclass, field

from benchmarks.engines.installation import Installation
from store.database import read_session
from store.records import PromotionState
from store.repositories.promotions import newest_promotions
from traced.inference.client import BASE
from traced.routing.composition import capability_of

ROLLBACK_SHARE = 0.3


@dataclass(frozen=True)
class Change:
    """The states of all promoted versions after a change that took place between ``began`` and ``end``."""

    began: float
    end: float
    states: dict[str, PromotionState]

    def current_model(self, model: str) -> str:
        """Return the model that serves a conversation that was routed to ``model``, as ``docs/serving.md`` says."""
        if model == BASE or self.states.get(model) in (PromotionState.LIVE, PromotionState.SUPERSEDED):
            return model
        live = [name for name, state in self.states.items() if state is PromotionState.LIVE]
        return next((name for name in live if capability_of(name) == capability_of(model)), BASE)


@dataclass
class Promotions:
    """Promotes and rolls back by chance; ``changes`` are in the order of time, the first one the initial state."""

    installation: Installation
    pause_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    changes: list[Change] = field(default_factory=list)

    async def run(self, ends_at: float) -> None:
        """Promote and roll back until ``ends_at`` (``time.monotonic``)."""
        while time.monotonic() < ends_at:
            await asyncio.sleep(self.pause_s * self.rng.uniform(0.2, 2))
            await asyncio.to_thread(self.change)

    def begin(self) -> None:
        """Put the first version of each capability live."""
        for name in sorted(self.installation.versions):
            if name.endswith("@v1"):
                self.installation.promote(name)
        self._note(time.monotonic())

    def change(self) -> None:
        """Roll back a live version, or promote another one in its place."""
        began = time.monotonic()
        versions = sorted(self.installation.versions)
        capability = capability_of(self.rng.choice(versions))
        live = self.installation.live().get(capability)
        if live is not None and self.rng.random() < ROLLBACK_SHARE:
            self.installation.roll_back(live)
        else:
            candidates = [name for name in versions if capability_of(name) == capability and name != live]
            self.installation.promote(self.rng.choice(candidates))
        self._note(began)

    def between(self, start: float, end: float) -> list[Change]:
        """Return the changes whose states may hold at some time from ``start`` to ``end``."""
        previous = [change for change in self.changes if change.end <= start]
        return [*previous[-1:], *(change for change in self.changes if change.end > start and change.began <= end)]

    def _note(self, began: float) -> None:
        with read_session(self.installation.store) as session:
            states = {entry.promotion.adapter: entry.promotion.state for entry in newest_promotions(session)}
        self.changes.append(Change(began, time.monotonic(), states))
