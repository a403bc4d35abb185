"""Spending limits per purpose, checked before each request.

A request is sent only if the usage so far plus the upper bounds of all requests in flight stays below the budget.
Otherwise the request waits until those in flight are answered. A budget is therefore exceeded by less than one reply.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agents.errors import BudgetSpent
from agents.llm.question import Ledger, Purpose, Usage


@dataclass(frozen=True)
class Budget:
    """Limits for one purpose: tokens (prompt and completion), money, seconds spent on replies; 0 means no limit."""

    tokens: int = 0
    cost: float = 0.0
    seconds: float = 0.0

    @property
    def is_limited(self) -> bool:
        """Whether any limit is set."""
        return bool(self.tokens or self.cost or self.seconds)

    def exhausted_limits(self, usage: Usage) -> str:
        """Return the limits that this usage reaches, as text; empty if it reaches none."""
        tokens = usage.prompt_tokens + usage.completion_tokens
        limits = []
        if 0 < self.tokens <= tokens:
            limits.append(f"{tokens} tokens of {self.tokens}")
        if 0 < self.cost <= usage.cost:
            limits.append(f"{usage.cost:.4g} of {self.cost:g} in money")
        if 0 < self.seconds <= usage.seconds:
            limits.append(f"{usage.seconds:.0f} of {self.seconds:g} seconds")
        return ", ".join(limits)


class InFlightUsage:
    """The upper bounds of the requests that are sent and not yet answered, by purpose."""

    def __init__(self) -> None:
        self._reservations: list[tuple[Purpose, Usage]] = []
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserve(
        self, budget: Budget, ledger: Ledger, purpose: Purpose, upper_bound: Usage
    ) -> AsyncIterator[None]:
        """Reserve ``upper_bound`` for one request while the body runs.

        Raises:
            BudgetSpent: a limit is already reached.
        """
        while budget.is_limited:
            usage = ledger.usage(purpose)
            if exceeded := budget.exhausted_limits(usage):
                raise BudgetSpent(
                    f"{exceeded} spent on {_purpose_name(purpose)}, in {usage.calls} replies, which are stored",
                    hint="raise the budget; stored replies are reused",
                )
            if not budget.exhausted_limits(self._with_reservations(usage, purpose)):
                break
            await self._released.wait()
        entry = (purpose, upper_bound)
        self._reservations.append(entry)
        try:
            yield
        finally:
            self._reservations.remove(entry)
            self._released.set()
            self._released = asyncio.Event()

    def _with_reservations(self, usage: Usage, purpose: Purpose) -> Usage:
        for other, upper_bound in self._reservations:
            if purpose.covers(other):
                usage = usage.combined(upper_bound)
        return usage


def _purpose_name(purpose: Purpose) -> str:
    return f"{purpose.stage} of {purpose.capability}" if purpose.capability else purpose.stage
