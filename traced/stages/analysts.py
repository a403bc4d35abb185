"""Who analyses: the builtin analyst, which needs nothing, or a language model (``[llm]``).

Invariants: both answer with the same form; the seed and the settings decide what the builtin one says, and the stored
replies what the model has said. Capabilities that the target's earlier cycles named keep their names and texts. How it
fails: ``AgentsError`` where the model was asked in vain; what it has answered until then is kept, and the same command
carries on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import sqlalchemy

from agents.analyst.builtin import discover, label_runs
from agents.analyst.llm.analyst import RUNS, Analysis, analyse
from agents.analyst.llm.analyst import label as label_with
from agents.analyst.llm.asking import Tell
from agents.errors import AgentsError
from agents.llm.question import Purpose
from store.database import reading
from store.repositories.capabilities import newest_named
from store.types import Capability, Label, Trajectory
from traced.config import Settings
from traced.stages.context import utc_now

if TYPE_CHECKING:
    from agents.llm.model import Model

BUILTIN, LLM = "builtin", "llm"
BUILTIN_RUNS = 10
KNOWN = 200  # capabilities of earlier cycles, the newest
CONTEXT = 32_000  # tokens, where neither the settings nor the server tell
LARGEST = 100_000  # what a model reads at once; more does not make it read better


@dataclass(frozen=True)
class Surroundings:
    """Where an analysis stands: what it may use, and whose questions it asks."""

    settings: Settings
    store: sqlalchemy.Engine
    cycle_id: str
    target: str
    now: Callable[[], datetime] = utc_now


async def analysed(around: Surroundings, trajectories: Sequence[Trajectory], analyst: str, tell: Tell) -> Analysis:
    """What the analyst of this name says of the trajectories; nothing but a model's replies is stored."""
    settings = around.settings
    runs = settings.analysis.runs
    if analyst == BUILTIN:
        # On a thread: it computes for seconds, and the display and Ctrl-C should not wait for it.
        return await asyncio.to_thread(_builtin, trajectories, runs or BUILTIN_RUNS, settings.seed)
    with reading(around.store) as session:
        named = newest_named(session, limit=KNOWN, target=around.target, beside=around.cycle_id)
    async with _model(around) as model:
        return await analyse(
            model,
            trajectories,
            purpose=Purpose(around.cycle_id, "analyze"),
            context=_context(model),
            runs=runs or RUNS,
            seed=settings.seed,
            known=[one.capability for one in named],
            tell=tell,
        )


async def labelled(
    around: Surroundings, trajectories: Sequence[Trajectory], capability: Capability, stage: str, tell: Tell
) -> list[Label]:
    """One run of a model's labels for a capability that has no builtin detector."""
    async with _model(around) as model:
        return await label_with(
            model,
            trajectories,
            [capability],
            purpose=Purpose(around.cycle_id, stage, capability.name),
            context=_context(model),
            seed=around.settings.seed,
            tell=tell,
        )


@asynccontextmanager
async def _model(around: Surroundings) -> "AsyncIterator[Model]":
    from traced.llm.connect import model  # it loads a client for HTTP
    from traced.llm.ledger import StoreLedger

    try:
        async with model(around.settings, StoreLedger(around.store, around.now)) as asked:
            yield asked
    except AgentsError as error:
        raise error.within("the llm analyst", hint=error.hint or "traced llm check") from error


def _context(model: "Model") -> int:
    return min(model.endpoint.context_tokens or CONTEXT, LARGEST)


def _builtin(trajectories: Sequence[Trajectory], runs: int, seed: int) -> Analysis:
    capabilities = discover(trajectories, seed=seed)
    return Analysis(capabilities, label_runs(trajectories, capabilities, runs=range(runs), seed=seed))
