"""Conversations with something in every field that nobody may see, and their analysis by a scripted model."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import SecretStr

from agents.analyst.llm.analysis import Analysis, analyse
from agents.llm.model import Endpoint, Model
from agents.llm.question import InMemoryLedger, Purpose
from store.types import Capability, Trajectory, Verdict
from tests.scripted_analyst import Thinking
from tests.scripted_model import served
from tests.unit.agents.analysis.library import background

PURPOSE = Purpose("c1", "analyze")
CANARIES = ("canary-part", "canary-task", "canary-detail", "canary-source", "canary-id", "0.123454321", "canary-model")
RUNS, CONCURRENCY = 3, 8  # the latter an endpoint's own


def hidden(one: Trajectory, number: int) -> Trajectory:
    """With something in every field that no agent in production could see, and unlike all others."""
    messages = [{**message, "canary-part": "canary-part"} for message in one.messages]
    messages[1]["content"] += f" This is case {number}."
    changes: dict[str, Any] = {
        "id": f"canary-id-{number}",
        "task_id": f"canary-task-{number % 7}",
        "source": "canary-source",
        "split": "canary-source",
        "model": "canary-model",
        "parts": {"canary-part": 0.123454321},
        "detail": "canary-detail",
        "reward": 0.123454321,
        "messages": messages,
    }
    return replace(one, **changes)


_ALL = background()
TRAJECTORIES = [hidden(one, number) for number, one in enumerate([*_ALL[:8], *_ALL[30:48]])]


def analysed(
    script: Thinking,
    trajectories: Sequence[Trajectory] = TRAJECTORIES,
    known: Sequence[Capability] = (),
    *,
    context: int = 32_000,
    ledger: InMemoryLedger | None = None,
    runs: int = RUNS,
) -> Analysis:
    """What comes of it; the server refuses whatever holds a canary, and the test fails then."""
    kept = ledger or InMemoryLedger()

    async def work(url: str) -> Analysis:
        told: list[tuple[str, int, int]] = []
        async with Model(Endpoint(url, "scripted", SecretStr("key")), kept) as model:
            found = await analyse(
                model,
                trajectories,
                purpose=PURPOSE,
                context=context,
                runs=runs,
                seed=0,
                known_capabilities=known,
                report_progress=lambda *how_far: told.append(how_far),
            )
        far = [done for _, done, _ in told]
        assert far == sorted(far) or found.figures["runs made again"]
        assert not found.labels or told[-1][1] == told[-1][2]
        return found

    with served(script, canaries=CANARIES) as server:
        return asyncio.run(work(server.url))


def complete(found: Analysis, trajectories: Sequence[Trajectory], runs: int = RUNS) -> bool:
    """Every cell of the mined trajectories exactly once, every citation of a message that exists."""
    mined = {one.id: one for one in trajectories if one.outcome.is_judged and one.id not in found.excluded}
    cells = [(one.trajectory_id, one.capability, one.run) for one in found.labels]
    wanted = {(key, one.name, run) for key in mined for one in found.capabilities for run in range(runs)}
    assert len(cells) == len(set(cells))
    assert set(cells) == wanted
    for one in found.labels:
        assert (one.message_index is None) == (one.verdict is Verdict.NA)
        assert one.message_index is None or 0 < one.message_index < len(mined[one.trajectory_id].messages)
    for cited in found.citations:
        assert 0 < cited.message_index < len(mined[cited.trajectory_id].messages)
    assert {one.capability for one in found.citations} == {one.name for one in found.capabilities}
    return bool(cells)


SOME = [TRAJECTORIES[0], *TRAJECTORIES[8:16]]
