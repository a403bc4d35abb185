"""What may be spent for one purpose: checked before each request against what was spent and what is in flight.

Invariants: a request is sent only while less than the budget is spent, and while what was spent and what those in
flight may still take together stay below it; one that has to wait for these waits. So a budget is overrun by less than
one reply. How it fails: ``BudgetSpent`` names what was spent of what.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agents.errors import BudgetSpent
from agents.llm.question import Ledger, Purpose, Spent


@dataclass(frozen=True)
class Budget:
    """Bounds for a purpose: tokens (prompt and completion), money, seconds of waiting for replies; 0 is no bound."""

    tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    @property
    def bound(self) -> bool:
        """Whether it bounds anything."""
        return bool(self.tokens or self.cost or self.seconds)

    def used_up(self, spent: Spent) -> str:
        """What of it is used up, in words; "" where nothing is."""
        tokens = spent.prompt_tokens + spent.completion_tokens
        told = []
        if 0 < self.tokens <= tokens:
            told.append(f"{tokens} tokens of {self.tokens}")
        if 0 < self.cost <= spent.cost:
            told.append(f"{spent.cost:.4g} of {self.cost:g} in money")
        if 0 < self.seconds <= spent.seconds:
            told.append(f"{spent.seconds:.0f} of {self.seconds:g} seconds")
        return ", ".join(told)


class InFlight:
    """What requests that were sent and are not answered may take, by purpose."""

    def __init__(self) -> None:
        self._held: list[tuple[Purpose, Spent]] = []
        self._landed = asyncio.Event()

    @asynccontextmanager
    async def within(self, budget: Budget, ledger: Ledger, purpose: Purpose, most: Spent) -> AsyncIterator[None]:
        """Hold ``most`` for a request as long as the body runs; raises ``BudgetSpent`` where there is nothing left."""
        while budget.bound:
            spent = ledger.spent(purpose)
            if told := budget.used_up(spent):
                raise BudgetSpent(
                    f"{told} spent on {_named(purpose)}, in {spent.calls} replies; those are kept",
                    hint="raise the budget; what was answered is not asked again",
                )
            if not budget.used_up(self._on_top_of(spent, purpose)):
                break
            await self._landed.wait()
        entry = (purpose, most)
        self._held.append(entry)
        try:
            yield
        finally:
            self._held.remove(entry)
            self._landed.set()
            self._landed = asyncio.Event()

    def _on_top_of(self, spent: Spent, purpose: Purpose) -> Spent:
        for other, most in self._held:
            if purpose.covers(other):
                spent = spent.plus(most)
        return spent


def _named(purpose: Purpose) -> str:
    return f"{purpose.stage} of {purpose.capability}" if purpose.capability else purpose.stage
